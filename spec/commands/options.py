"""Options that several commands share."""

from typing import Annotated

import typer

Target = Annotated[str, typer.Option(help="Target: m3-tiny, MiniMax-M3, or a directory.")]
Draft = Annotated[
    str, typer.Option(help="Draft: eagle3 (resolved by target), a directory, a hub id, or none for plain decoding.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or cuda:N; auto: cuda where there is one.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of sampled answers.")]


def draft_name(option: str) -> str | None:
    """The draft that was named, None for plain decoding."""
    return None if option == "none" else option
