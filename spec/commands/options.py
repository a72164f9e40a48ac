"""Options that several commands share."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from target_model.errors import UserError, check_output

Target = Annotated[str, typer.Option(help="Target: m3-tiny, MiniMax-M3, or a directory.")]
Draft = Annotated[
    str, typer.Option(help="Draft: eagle3 (resolved by target), a directory, a hub id, or none for plain decoding.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or cuda:N; auto: cuda where there is one.")]
Dummy = Annotated[
    str | None,
    typer.Option(
        "--dummy-weights",
        help="Random weights instead of a checkpoint, in this format: bf16, mxfp8, mxfp4 or nvfp4.",
        metavar="FORMAT",
    ),
]
Layers = Annotated[int | None, typer.Option(min=1, help="With --dummy-weights: only the first layers. Default: all.")]
Processes = Annotated[
    int,
    typer.Option(
        "--tp", min=1, help="Split the target over this many processes, one GPU each: heads, inner widths and experts."
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of sampled answers.")]


def with_fields(run: Callable[[Any], None]) -> Callable[..., None]:
    """A command whose options are the fields of the dataclass that `run` takes: a field's annotation says what its
    option is, its default is the option's.
    """
    (parameter,) = inspect.signature(run).parameters.values()

    def command(**values: Any) -> None:
        run(parameter.annotation(**values))

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__signature__ = inspect.signature(parameter.annotation)
    return command


def draft_name(option: str) -> str | None:
    """The draft that was named, None for plain decoding."""
    return None if option == "none" else option


def measured_draft(option: str) -> str:
    """The draft of a command that has nothing to do without one."""
    if option == "none":
        raise UserError("--draft none: what a draft brings is measured here, so name one")
    return option


def output_file(path: Path | None) -> Path | None:
    """Callback of an option: refuses a file that cannot be written before anything else is done."""
    if path is not None and path.is_dir():
        raise UserError(f"{path} is a directory, not a file to write")
    return output_directory(path)


def output_directory(path: Path | None) -> Path | None:
    """As `output_file`, for a directory that is to be made."""
    if path is not None:
        check_output(path)
    return path
