"""`spec capture`: the target's features on disk, so that training needs no target."""

from pathlib import Path
from typing import Annotated

import typer


def capture(
    config: Annotated[str, typer.Option(help="Recipe: a name under configs/, or a YAML file.")],
    output: Annotated[Path, typer.Option(help="Directory to fill; an interrupted capture is continued.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SECTION.KEY=VALUE]...", help="Settings that differ from the recipe's.", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="bf16, fp32, or fp8 (e4m3 with a scale for each tap of a token).")
    ] = "bf16",
    plan: Annotated[bool, typer.Option("--plan", help="Print the size on disk, and stop.")] = False,
) -> None:
    """Run the frozen target once over a recipe's data and keep its taps and final states.

    Train from them with features.store=DIRECTORY. A run whose target, tokenizer, template, taps or data differ is
    refused.
    """
    from train.capture import capture_store
    from train.config import load_config

    result = capture_store(load_config(config, overrides or []), output, dtype=dtype, plan_only=plan)
    if result is not None:
        refused = f", {result.refused} refused as not finite" if result.refused else ""
        print(f"{result.rows} rows{refused}, {result.size / 1e9:.3f} GB")
        settings = " ".join([*(overrides or []), "features.cache=false", f"features.store={result.directory}"])
        print(f"train from it: spec train --config {config} {settings}")
