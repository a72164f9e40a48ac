"""`spec tune ...`: settings that suit this machine."""

from pathlib import Path
from typing import Annotated

import typer

from spec.commands.options import Device, Seed, Target, measured_draft, output_file

tune = typer.Typer(no_args_is_help=True, help="Find the settings that are fastest here.")


@tune.callback()
def group() -> None:
    """Find the settings that are fastest here."""


@tune.command()
def tree(
    target: Target = "m3-tiny",
    draft: Annotated[str, typer.Option(help="eagle3 (resolved by target), a directory, or a hub id.")] = "eagle3",
    batch: Annotated[str, typer.Option(help="Requests at a time: 4, or 1..16 for a tree that suits them all.")] = "1",
    temperature: Annotated[str, typer.Option(help="Temperatures, comma separated; all count alike.")] = "0,1",
    suite: Annotated[
        str, typer.Option(help="A bundled suite or a file of prompts like those to be served.")
    ] = "held_out",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, from the first.")] = 8,
    tokens: Annotated[int, typer.Option(min=8, help="New tokens for each, at most.")] = 96,
    finalists: Annotated[int, typer.Option(min=1, max=32, help="Shapes that are measured.")] = 6,
    seed: Seed = 0,
    device: Device = "auto",
    output: Annotated[Path, typer.Option(help="The file to write.", callback=output_file)] = Path("tree.yaml"),
) -> None:
    """Find the tree that decodes fastest with a draft on this machine; `spec serve --tree-file` takes the file."""
    from spec.bench import tune as search
    from spec.bench.acceptance import parse_temperatures

    search.run(
        search.Settings(
            target=target,
            draft=measured_draft(draft),
            suite=suite,
            prompts=prompts,
            tokens=tokens,
            temperatures=parse_temperatures(temperature),
            batches=search.parse_batches(batch),
            finalists=finalists,
            seed=seed,
            device=device,
        ),
        output,
    )
