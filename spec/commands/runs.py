"""`spec runs`: what was trained here."""

import re
from pathlib import Path
from typing import Annotated

import typer

_END = 1 << 16


def runs(
    root: Annotated[Path, typer.Argument(help="Directory that holds the runs.")] = Path("runs"),
) -> None:
    """List training runs, the best served acceptance length (AL) first; tau_sim is the AL that training predicts."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from draft_model.resolve import list_runs, without_record
    from target_model.errors import UserError

    found = list_runs(root, exported=False)
    unrecorded = sorted(folder for folder in root.glob("*/") if without_record(folder))
    if not found and not unrecorded:
        raise UserError(f"no training run under {root}")
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("run", "target", "AL", "tau_sim", "step", "state", "draft"):
        right, path = name in ("AL", "tau_sim", "step"), name in ("target", "draft")
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=not path)
    for run in found:
        measured = "not judged" if run.best_al is None else f"{run.best_al:.2f}"
        state = "complete" if run.complete else "not finished"
        draft = run.path / "draft"
        place = str(draft) if draft.is_dir() else "none yet"
        table.add_row(run.name, run.target, measured, _predicted(run.path / "log.jsonl"), str(run.step), state, place)
    for folder in unrecorded:
        table.add_row(folder.name, "-", "not judged", "-", "-", "no record yet", "none yet")
    Console().print(table)


def _predicted(log: Path) -> str:
    """The last tau_sim of a run's log, of which only the end is read."""
    if not log.is_file():
        return "-"
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - _END))
        lines = file.read().splitlines()
    for line in reversed(lines):
        # Not parsed: the first line may be cut here, the last one by whatever ended the run.
        if found := re.search(rb'"tau_sim": ([0-9.]+),.*"tokens_per_second"', line):
            return f"{float(found[1]):.2f}"
    return "-"
