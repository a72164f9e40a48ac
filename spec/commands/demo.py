"""`spec demo`: the whole main job in a few minutes, without a GPU."""

from typing import Annotated

import typer

from spec.commands.options import Seed


def demo(
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps. Default: those of configs/demo.yaml.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of HumanEval to decode.")] = 5,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens for each prompt, at most.")] = 64,
    seed: Seed = 0,
) -> None:
    """Train a small draft for the bundled target, then decode real prompts with and without it."""
    from spec.demo import run

    run(steps=steps, prompts=prompts, tokens=tokens, seed=seed)
