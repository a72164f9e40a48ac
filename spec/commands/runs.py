"""`spec runs`: what was trained here."""

from pathlib import Path
from typing import Annotated

import typer


def runs(
    root: Annotated[Path, typer.Argument(help="Directory that holds the runs.")] = Path("runs"),
) -> None:
    """List training runs with their best served acceptance length, the best first."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from draft_model.resolve import list_runs
    from target_model.errors import UserError

    found = list_runs(root)
    if not found:
        raise UserError(f"no training run with an exported draft under {root}")
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("run", "target", "AL", "step", "state", "draft"):
        table.add_column(name, justify="right" if name in ("AL", "step") else "left", overflow="fold")
    for run in found:
        measured = "-" if run.best_al is None else f"{run.best_al:.2f}"
        state = "complete" if run.complete else "not finished"
        table.add_row(run.name, run.target, measured, str(run.step), state, str(run.path / "draft"))
    Console().print(table)
