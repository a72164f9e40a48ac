"""`spec tune tree`: the tree that decodes fastest with a draft on this machine.

Hundreds of shapes are replayed in a recorded run and priced with measured costs; the most promising ones then decode
real prompts, and what is fastest there wins.
"""

import json
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from serve.budget import OFF
from serve.tree import TreeConfig
from spec.bench.acceptance import longest_context
from spec.bench.costs import StepCosts, measure
from spec.bench.recording import Recording, record
from spec.bench.replay import acceptance, best_static_tree
from spec.bench.sweep import Condition, Contender, Row, short_name, sweep_with_progress
from spec.pair import Pair, load_pair
from spec.suites import load_suite
from spec.tree_file import write_tree
from target_model.errors import UserError

NODES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)
WIDTHS = (2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Settings:
    """See `spec tune tree --help`. batches: requests at a time; all count alike, as all temperatures do."""

    target: str
    draft: str
    suite: str
    prompts: int
    tokens: int
    temperatures: tuple[float, ...]
    batches: tuple[int, ...]
    finalists: int
    seed: int
    device: str


def parse_batches(text: str) -> tuple[int, ...]:
    """From "4", or from a range "1..16": its ends and the powers of two between them."""
    first, dots, last = text.partition("..")
    try:
        low, high = int(first), int(last if dots else first)
    except ValueError:
        low = high = 0
    if not 1 <= low <= high <= 256:
        raise UserError(f"--batch must be a number or a range like 1..16, within 1 and 256; got {text!r}")
    return tuple(sorted({low, high, *(2**power for power in range(9) if low < 2**power < high)}))


def run(settings: Settings, output: Path) -> TreeConfig:
    """Finds the tree, prints how it was found, writes `output`, and prints one JSON line last."""
    console = Console()
    suite = load_suite(settings.suite, settings.prompts)
    if len(suite.prompts) < max(settings.batches):
        raise UserError(
            f"{len(suite.prompts)} prompts are too few for a batch of {max(settings.batches)}: raise --prompts, or "
            "name a larger --suite"
        )
    pair = load_pair(settings.target, settings.draft, settings.device)
    console.print(pair.description)
    longest = longest_context(pair, list(suite.prompts), settings.tokens)
    with console.status("recording what the draft proposes"):
        recordings = [
            record(
                pair,
                {suite.name: suite.prompts},
                Condition(each),
                tokens=settings.tokens,
                seed=settings.seed,
                longest=longest,
            )
            for each in settings.temperatures
        ]
    with console.status("measuring what a step costs"):
        costs = measure(pair, max(settings.batches), longest // 2)
    ranked = rank(recordings, costs, settings.batches)
    chosen = finalists(ranked, settings.finalists)
    console.print(
        f"{len(ranked)} shapes replayed, {len(chosen)} measured on {len(suite.prompts)} prompts of {suite.name}"
    )
    rows = _measure(settings, pair, suite.prompts, chosen, longest, console)
    measured = {shape: _score([row for row in rows if row.shape == shape]) for shape in chosen}
    best = max(measured, key=measured.__getitem__)
    if measured[best] <= 1:
        best = OFF
    console.print(_table(chosen, ranked, measured, rows, best))
    if best == OFF:
        console.print("[yellow]no tree is faster than plain decoding here[/]: the file says to draft nothing")
    write_tree(output, best, _record(settings, pair, best, measured, rows))
    console.print(f"written: {output}; serve with it: spec serve --tree-file {output}")
    speed_up = round(measured.get(best, 1.0), 4)
    print(json.dumps({"benchmark": "tune tree", "tree": short_name(best), "speed_up": speed_up, "shapes": len(ranked)}))
    return best


def candidates(recordings: list[Recording]) -> list[TreeConfig]:
    """Chains, dynamic trees, and for every size and depth the static tree that fits a recording best."""
    depth, widest = recordings[0].depth, recordings[0].width
    shapes = [TreeConfig.chain(length) for length in range(1, depth + 1)]
    for levels in range(1, depth + 1):
        for nodes in NODES:
            shapes += [
                TreeConfig(levels, width, nodes)
                for width in WIDTHS
                if width <= widest
                and levels < nodes <= 1 + width + (levels - 1) * width**2
                and width * (levels - 1) <= 64
            ]
            static = [best_static_tree(recording, nodes, levels) for recording in recordings]
            shapes += [shape for shape in static if shape.width > 1]  # the others are chains
    return list(dict.fromkeys(shapes))


def rank(recordings: list[Recording], costs: StepCosts, batches: tuple[int, ...]) -> dict[TreeConfig, float]:
    """Expected speed-up over plain decoding of every candidate, best first: the geometric mean over recordings and
    batches.
    """
    expected = {}
    for shape in candidates(recordings):
        lengths = [acceptance(recording, shape).length or 1.0 for recording in recordings]
        expected[shape] = _mean([costs.speed_up(shape, length, batch) for length in lengths for batch in batches])
    return dict(sorted(expected.items(), key=lambda entry: -entry[1]))


def finalists(ranked: dict[TreeConfig, float], count: int) -> list[TreeConfig]:
    """The best chain, dynamic and static tree, and the best of other sizes until there are `count`: what is expected is
    not exact, and shapes of one size resemble each other. The server's default comes besides.
    """
    kinds = (
        next(shape for shape in ranked if shape.width == 1),
        next((shape for shape in ranked if shape.paths and shape.width > 1), None),
        next((shape for shape in ranked if not shape.paths and shape.width > 1), None),
    )
    chosen = [shape for shape in kinds if shape is not None]
    for shape in ranked:
        if len(chosen) < count and shape.nodes not in {each.nodes for each in chosen}:
            chosen.append(shape)
    return list(dict.fromkeys([*chosen, TreeConfig()]))


def _measure(
    settings: Settings, pair: Pair, prompts, shapes: list[TreeConfig], longest: int, console: Console
) -> list[Row]:
    together = max(settings.batches)
    plain = pair.engine(None, longest, together)
    contenders = [Contender(settings.draft, pair.engine(shape, longest, together)) for shape in shapes]
    conditions = [Condition(each, concurrency=batch) for batch in settings.batches for each in settings.temperatures]
    suites, tokens, seed = {settings.suite: prompts}, settings.tokens, settings.seed
    return sweep_with_progress(console, plain, contenders, suites, conditions, pair, tokens=tokens, seed=seed)


def _score(rows: list[Row]) -> float:
    return _mean([row.decode_speed_up for row in rows])


def _mean(values: list[float]) -> float:
    """Geometric: twice as fast and half as fast cancel out."""
    return exp(sum(map(log, values)) / len(values))


def _speed(row: Row) -> float:
    """Tokens a second while decoding; the first token of an answer comes from its prefill."""
    return sum(answer.acceptance.emitted for answer in row.answers) / row.time.decode


def _table(
    shapes: list[TreeConfig],
    ranked: dict[TreeConfig, float],
    measured: dict[TreeConfig, float],
    rows: list[Row],
    best: TreeConfig,
) -> Table:
    conditions = list(dict.fromkeys(row.condition for row in rows))
    table = Table(title="decoding, tokens a second and speed-up over plain", title_justify="left", box=None)
    table.add_column("shape", no_wrap=True)
    asked = (f"T = {condition.temperature:g}\nbatch {condition.concurrency}" for condition in conditions)
    for heading in ("expected", "measured", *asked):
        table.add_column(heading, justify="right", no_wrap=True)
    for shape in sorted(shapes, key=lambda shape: -measured[shape]):
        own = {row.condition: row for row in rows if row.shape == shape}
        speeds = (f"{_speed(own[condition]):.0f}" for condition in conditions)
        expected = f"{ranked[shape]:.2f}x" if shape in ranked else ""
        name = f"[bold]{short_name(shape)}[/]" if shape == best else short_name(shape)
        table.add_row(name, expected, f"{measured[shape]:.2f}x", *speeds)
    return table


def _record(
    settings: Settings, pair: Pair, best: TreeConfig, measured: dict[TreeConfig, float], rows: list[Row]
) -> dict[str, Any]:
    """What the file tells people."""
    chosen = [row for row in rows if row.shape == best]
    return {
        "pair": pair.description.splitlines(),
        "device": str(pair.target.device),
        **{
            name: value for name, value in _plain(asdict(settings)).items() if name not in ("target", "draft", "device")
        },
        "speed_up": {short_name(shape): round(value, 3) for shape, value in measured.items()},
        "tokens_per_second": {str(row.condition): round(_speed(row), 1) for row in chosen},
        "AL": {str(row.condition): round(row.acceptance.length or 1.0, 3) for row in chosen},
    }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
