"""`spec inspect`: what a target is and needs."""

from typing import Annotated

import typer


def inspect(
    target: Annotated[str, typer.Argument(help="m3-tiny, MiniMax-M3, a directory, or a config.json.")],
) -> None:
    """Show a target's parts, sizes, needs and layers; check a checkpoint directory tensor by tensor.

    From the config alone unless a directory holds weights; nothing is downloaded. Exit code 1: the checkpoint does not
    match its config.
    """
    from spec.inspect import run

    if not run(target):
        raise typer.Exit(1)
