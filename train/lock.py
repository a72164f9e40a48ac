"""One training run at a time in a run's folder: a lock that the kernel releases with the process, however it ends."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from target_model.errors import UserError

LOCK = "lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes `folder` and holds it; UserError that names the process which holds it already. Rank 0 only.

    The file says who holds it. It is removed at the end, and the folder with it while nothing else is in there; what a
    killed process leaves does not count, as its lock is gone.
    """
    try:
        descriptor = _open(folder)
    except OSError as error:
        raise UserError(f"run folder {folder} cannot be made or locked: {error}") from None
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
        os.close(descriptor)


def _open(folder: Path) -> int:
    """A descriptor of the lock file, locked, that is still the one in the folder: its last holder may have removed it
    between our opening and locking it.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # the folder went with its last holder
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / LOCK).exists() and os.path.samestat(os.fstat(descriptor), os.stat(folder / LOCK)):
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise UserError(f"run folder {folder} is in use: {holder} trains in it") from None
        except FileNotFoundError:
            pass
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
