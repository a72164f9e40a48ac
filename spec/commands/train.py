"""`spec train`: trains an EAGLE-3 draft for a frozen target."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer


def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SECTION.KEY=VALUE]...", help="Settings that differ from the recipe's.", show_default=False
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Target: m3-tiny, MiniMax-M3, or a directory. Default: the recipe's.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="Recipe: a name under configs/, or a YAML file. Default: the target's, without target demo."),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print the resolved run with its memory and disk, and stop.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Train a draft; the best checkpoint is the one with the best served acceptance. Continues an interrupted run.

    With several processes: torchrun --nproc-per-node N -m spec.cli train ...
    """
    from spec.interruption import Interruption

    interruption = Interruption()
    with interruption.watched():
        from train.config import load_config

        named = [] if target is None else [f"target={json.dumps(target)}"]
        settings = interruption.config = load_config(config or _recipe(target), [*named, *(overrides or [])])
        if plan:
            from target_model.resolve import resolve_config
            from train.plan import plan as describe

            print(describe(settings, resolve_config(settings.target), int(os.environ.get("WORLD_SIZE", "1"))))
            return
        from spec.judge import served_acceptance
        from train.loop import train as run

        judge = served_acceptance(settings.target, settings.ttt.draft_attention)
        result = run(settings, judge=judge, progress=not quiet, stop=interruption.stop)
        if result.stopped:
            interruption.end()
    if os.environ.get("RANK", "0") == "0":
        measured = "" if result.best is None else f", AL {result.best['al']:.2f} at step {result.best['step']}"
        print(f"trained {result.step} steps{measured}\nserve it: spec serve --draft {result.draft}")


def _recipe(target: str | None) -> str:
    """The recipe named after a target, in lower case; the demo's where no target was named."""
    import configs
    from target_model.errors import UserError

    if target is None:
        return "demo"
    name = target.removeprefix("MiniMaxAI/").lower()
    known = sorted(path.stem for path in Path(configs.__file__).parent.glob("*.yaml"))
    if name not in known:
        raise UserError(f"no recipe is named after target {target}: choose one with --config ({', '.join(known)})")
    return name
