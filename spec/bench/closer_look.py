"""What `--analyse` adds to a result: recorded runs, their analysis, replayed trees and expected speed-ups."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from serve.tree import TreeConfig
from spec.bench.analysis import breakdown, budgets, replayed
from spec.bench.costs import StepCosts, costs_json
from spec.bench.recording import Recording, record
from spec.bench.statistics import NOTHING, Acceptance
from spec.bench.sweep import Condition, Row, short_name
from spec.bench.tables import number
from spec.pair import Pair
from spec.suites import Prompt


def look_closer(
    pairs: dict[str, Pair],
    suites: dict[str, Sequence[Prompt]],
    conditions: Sequence[Condition],
    rows: Sequence[Row],
    costs: StepCosts,
    *,
    tokens: int,
    seed: int,
    longest: int,
) -> tuple[dict[str, Any], dict[str, Recording]]:
    """Records every draft under every condition, as the sweep's first repeat; how many requests are answered together
    changes no answer.

    Returns what goes into the result, and the recordings by file name.
    """
    runs, recordings = [], {}
    fewest = min(each.concurrency for each in conditions)
    for draft, pair in pairs.items():
        for condition in (each for each in conditions if each.concurrency == fewest):
            asked = str(replace(condition, concurrency=1))
            about = {"draft": draft, "pair": pair.description, "condition": asked, "seed": seed}
            recording = record(pair, suites, condition, tokens=tokens, seed=seed, longest=longest, about=about)
            name = f"recorded-{len(runs)}.npz"
            recordings[name] = recording
            own = [row for row in rows if (row.draft, row.condition) == (draft, condition)]
            runs.append(
                {
                    "draft": draft,
                    "condition": asked,
                    "file": name,
                    "positions": len(recording.rank),
                    "texts": len(recording.texts),
                    "recorded_tree": {"depth": recording.depth, "width": recording.width},
                    **breakdown(recording, pair.tokenizer),
                    "budgets": budgets(recording),
                    "trees": _trees(recording, own, costs),
                }
            )
    return {"runs": runs, "costs": costs_json(costs)}, recordings


def _trees(recording: Recording, rows: Sequence[Row], costs: StepCosts) -> list[dict[str, Any]]:
    """Each measured shape that the recorded tree can hold: as measured, as replayed, and what it promises."""
    measured: dict[TreeConfig, Acceptance] = {}
    for row in rows:
        # Of the sweep's repeats only the first was recorded.
        seeds = {text.seed for text in recording.texts if text.suite == row.suite}
        counts = (each.acceptance for each in row.answers if each.seed in seeds)
        measured[row.shape] = sum(counts, measured.get(row.shape, NOTHING))
    return [
        {
            "shape": short_name(shape),
            "measured_AL": measured[shape].length,
            "replayed_AL": length,
            "expected_speed_up": length and costs.speed_up(shape, length, 1),
        }
        for shape, length in replayed(recording, list(measured)).items()
    ]


def print_closer_look(console: Console, analysis: dict[str, Any]) -> None:
    for run in analysis["runs"]:
        title = f"{run['draft']}, {run['condition']}: {run['positions']} recorded positions"
        table = Table(title=title, title_justify="left", title_style="bold", box=None)
        table.add_column("group", no_wrap=True)
        for heading in ("tokens", "first guess", "among best", "chain"):
            table.add_column(heading, justify="right")
        for name in ("category", "turn", "position", "token type", "context", "entropy"):
            table.add_row(f"[italic]{name}[/]")
            for row in run[name]:
                figures = (number(row[column]) for column in ("first", "among", "chain"))
                table.add_row(f"  {row['group']}", str(row["tokens"]), *figures)
        console.print(table)
        console.print(_budget_table(run))


def _budget_table(run: dict[str, Any]) -> Table:
    columns = list(dict.fromkeys(name for row in run["budgets"] for name in row))
    table = Table(title="AL by drafted nodes, replayed", title_justify="left", title_style="italic", box=None)
    for column in columns:
        table.add_column(column, justify="right")
    for row in run["budgets"]:
        values = (row.get(column) for column in columns)
        table.add_row(
            *(
                value if isinstance(value, str) else str(value) if isinstance(value, int) else number(value)
                for value in values
            )
        )
    return table
