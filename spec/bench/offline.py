"""`spec bench replay`: trees replayed in a recorded run."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from serve.tree import TreeConfig
from spec.bench.recording import Recording
from spec.bench.replay import best_static_tree, replay, walk
from spec.bench.sweep import short_name
from spec.bench.tables import number
from target_model.errors import UserError


def run(path: Path, trees: Sequence[str], shapes: Sequence[TreeConfig], static: Sequence[int]) -> None:
    """Prints a table of all chains that the recording holds and of what was asked for, and one JSON line last."""
    if not path.is_file():
        raise UserError(f"no such recorded run: {path}")
    recording = Recording.load(path)
    wanted = [TreeConfig.chain(length) for length in range(1, recording.depth + 1)]
    wanted += [*map(TreeConfig.parse, trees), *shapes]
    wanted += [best_static_tree(recording, nodes, recording.depth) for nodes in static]
    console = Console()
    for name, value in recording.about.items():
        console.print(f"{name}: {value}", highlight=False)
    title = f"{len(recording.rank)} positions of {len(recording.texts)} answers"
    table = Table(title=title, title_justify="left", box=None)
    for heading in ("shape", "AL", "drafted a step", "per position (joint)", "not recorded"):
        table.add_column(heading)
    lengths = {}
    for shape in dict.fromkeys(wanted):
        replayed = replay(recording, shape)
        result = walk(recording, replayed, shape.depth)
        lengths[short_name(shape)] = result.length
        shares = " ".join(f"{share:.2f}" for share in result.per_position or ())
        drafted = result.drafted / result.steps if result.steps else None
        table.add_row(short_name(shape), number(result.length), number(drafted), shares, f"{replayed.missing:.1%}")
        if shape.paths:
            table.add_row(f"  {' '.join('.'.join(map(str, path)) for path in shape.paths)}")
    console.print(table)
    print(json.dumps({"benchmark": "replay", "AL": lengths}))
