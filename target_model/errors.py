"""Errors meant for people, and writing that never leaves half a file behind."""

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


class UserError(ValueError):
    """Something the user can mend. The message is one line that names the thing; the command line prints it and exits
    2.
    """


def check_output(path: Path) -> None:
    """Raises UserError for a file or directory that cannot be made where it is named: directories above it have to be
    there. For the time before any work is done.
    """
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no directory {path.parent}")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def full_disk(error: BaseException | None) -> BaseException | None:
    """The error among an error's causes that says that the disk is full, None if none does. Libraries which write files
    wrap the system's error in their own, or only quote it.
    """
    while error is not None:
        if (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left on device" in str(error):
            break
        error = error.__cause__ or error.__context__
    return error


@contextlib.contextmanager
def _full_disk_named(path: Path) -> Iterator[None]:
    """Neither libraries nor writing to an open file tell which file has no room."""
    try:
        yield
    except Exception as error:
        if full_disk(error) is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike, mode: str = "wb") -> Iterator[IO]:
    """Opens a temporary file beside `path` and renames it to `path` at the end; on any error `path` stays as it was."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with _full_disk_named(path), os.fdopen(handle, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes a value as indented JSON, whole or not at all."""
    with atomic_write(path, "w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")


@contextlib.contextmanager
def atomic_directory(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary directory beside `path` that replaces it at the end; on any error `path` stays as it was."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        with _full_disk_named(path):
            yield work
        os.chmod(work, 0o755)
        for file in work.rglob("*"):
            # Some writers create their files for the owner alone.
            file.chmod(0o755 if file.is_dir() else 0o644)
        if path.exists():
            # A directory cannot be replaced by rename while it has entries: the old one steps aside first.
            aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
            os.replace(path, aside / path.name)
            os.replace(work, path)
            shutil.rmtree(aside)
        else:
            os.replace(work, path)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
