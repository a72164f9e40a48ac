"""`spec quantize`: a checkpoint in a quantised format."""

from pathlib import Path
from typing import Annotated

import typer

from spec.commands.options import Device, output_directory


def quantize(
    source: Annotated[str, typer.Argument(help="Target in bf16: m3-tiny, MiniMax-M3, or a directory.")],
    destination: Annotated[
        Path, typer.Argument(help="Directory to write; it must not exist.", callback=output_directory)
    ],
    format: Annotated[str, typer.Option(help="mxfp8, mxfp4 or nvfp4 (with mxfp8 outside the routed experts).")],
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Glob of modules to leave in bf16, for example '*.index_k_proj'; repeatable."),
    ] = None,
    device: Device = "auto",
) -> None:
    """Write a checkpoint in one of the published quantised layouts, tensor by tensor."""
    from rich.console import Console
    from rich.progress import Progress

    from spec.pair import choose_device
    from target_model.quantise_checkpoint import quantise_checkpoint
    from target_model.sizes import bytes_text

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("quantising")
        written = quantise_checkpoint(
            source,
            destination,
            format,
            exclude=tuple(exclude or ()),
            device=choose_device(device),
            advance=lambda done, total: bar.update(task, completed=done, total=total),
        )
    counts = ", ".join(f"{count} {name}" for name, count in sorted(written.weights.items()))
    print(f"{destination}: {bytes_text(written.bytes)}, tensors: {counts}")
