"""`spec bench acceptance`: how many drafted tokens the target keeps, for chains and trees, greedy and sampled."""

import json
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from serve.request import SamplingParams
from serve.tree import TreeConfig
from spec.bench.closer_look import look_closer, print_closer_look
from spec.bench.costs import StepCosts, measure, read_costs
from spec.bench.recording import Recording
from spec.bench.report import write_report
from spec.bench.results import result_json
from spec.bench.sweep import Condition, Contender, Row, sweep_with_progress
from spec.bench.tables import print_definitions, print_rows
from spec.pair import Pair, pairs_of
from spec.suites import Prompt, Suite, load_suite
from spec.tree_file import read_tree
from target_model.errors import UserError, write_json

MAX_CHAIN = 16
THINKING = {"off": (False,), "on": (True,), "both": (False, True)}


@dataclass(frozen=True)
class Settings:
    """What to measure; see `spec bench acceptance --help`. Of every suite each `stride`-th prompt, `prompts` of them,
    and of each at most `turns` turns, None: all of them.
    """

    target: str
    drafts: tuple[str, ...]
    suites: tuple[str, ...]
    prompts: int
    stride: int
    turns: int | None
    tokens: int
    shapes: tuple[TreeConfig, ...]
    temperatures: tuple[float, ...]
    top_p: float
    top_k: int
    thinking: tuple[bool, ...]
    concurrency: tuple[int, ...]
    seed: int
    repeats: int
    device: str
    draft_weights: str | None = None

    def conditions(self) -> list[Condition]:
        """Every combination of what is varied."""
        varied = product(self.thinking, self.concurrency, self.temperatures)
        return [
            Condition(temperature, self.top_p, self.top_k, thinking, concurrency)
            for thinking, concurrency, temperature in varied
        ]


@dataclass(frozen=True)
class Outputs:
    """What to write, besides the tables: a JSON file, a directory with the report; and whether to look closer, with
    the costs of a file instead of this machine's.
    """

    json: Path | None = None
    report: Path | None = None
    analyse: bool = False
    costs: Path | None = None


def parse_shapes(chain: str, trees: list[str] | None, files: list[Path] | None = None) -> tuple[TreeConfig, ...]:
    """Chains from "1..8", "1,3" or "none"; trees from "depth,width,nodes" texts, ["none"] for no tree, None for the
    server's default; and trees from files."""
    shapes = [] if chain == "none" else [TreeConfig.chain(length) for length in _chain_lengths(chain)]
    for text in [None] if trees is None else trees:
        if text != "none":
            shapes.append(TreeConfig() if text is None else TreeConfig.parse(text))
    shapes += map(read_tree, files or ())
    if not shapes:
        raise UserError("nothing to measure: both --chain and --tree are none")
    return tuple(dict.fromkeys(shapes))


def _chain_lengths(text: str) -> list[int]:
    try:
        first, dots, last = text.partition("..")
        lengths = list(range(int(first), int(last) + 1)) if dots else [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or not all(1 <= length <= MAX_CHAIN for length in lengths):
        raise UserError(
            f"--chain must be like 3, 1..8, 1,3,5 or none, with lengths from 1 to {MAX_CHAIN}; got {text!r}"
        )
    return lengths


def parse_temperatures(text: str) -> tuple[float, ...]:
    """Comma separated temperatures, in order."""
    try:
        temperatures = {float(part) for part in text.split(",")}
    except ValueError:
        raise UserError(f"--temperature must be numbers separated by commas, for example 0,1; got {text!r}") from None
    for temperature in temperatures:
        SamplingParams(temperature=temperature)  # refuses negative and infinite ones
    return tuple(sorted(temperatures))


def with_one(temperatures: tuple[float, ...]) -> tuple[float, ...]:
    """1 is always measured: small models loop under greedy decoding, which flatters acceptance."""
    return tuple(sorted({*temperatures, 1.0}))


def parse_thinking(text: str) -> tuple[bool, ...]:
    """From off, on or both."""
    if text not in THINKING:
        raise UserError(f"--thinking must be off, on or both, got {text!r}")
    return THINKING[text]


def parse_concurrency(text: str, option: str = "--concurrency") -> tuple[int, ...]:
    """Comma separated numbers of requests that are answered together."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not all(1 <= number <= 256 for number in numbers):
        raise UserError(f"{option} must be numbers from 1 to 256, for example 1,8; got {text!r}")
    return tuple(numbers)


def run(settings: Settings, outputs: Outputs) -> bool:
    """Measures, prints tables and definitions, writes `outputs`, and prints one JSON line last. Says whether every
    greedy answer equals plain decoding's.
    """
    console = Console()
    suites = [_chosen(load_suite(name), settings) for name in settings.suites]
    if len({suite.name for suite in suites}) < len(suites):
        raise UserError("two suites have one name: give their files different names")
    SamplingParams(top_p=settings.top_p, top_k=settings.top_k)  # refuses what is out of range
    if outputs.report is not None and outputs.report.exists() and not (outputs.report / "result.json").exists():
        raise UserError(f"{outputs.report} exists and holds no report: name a new directory")
    costs = None if outputs.costs is None else read_costs(outputs.costs)
    pairs = pairs_of(settings.target, settings.drafts, settings.device, settings.draft_weights)
    for pair in pairs.values():
        console.print(pair.description)
    prompts = {suite.name: suite.prompts for suite in suites}
    rows = _measure(settings, prompts, pairs, console)
    print_rows(console, rows)
    result = result_json(rows, asdict(settings), {name: pair.description for name, pair in pairs.items()})
    recordings: dict[str, Recording] = {}
    if outputs.analyse:
        result["analysis"], recordings = _look_closer(settings, prompts, pairs, rows, costs, console)
    print_definitions(console)
    _write(result, recordings, outputs, console)
    greedy = [row for row in rows if row.temperature == 0]
    same, asked = sum(row.identical for row in greedy), sum(len(row.answers) for row in greedy)
    if greedy:
        verdict = "yes" if same == asked else "[red]no[/]"
        console.print(f"greedy answers identical to plain decoding: {verdict}, {same} of {asked}")
    print(json.dumps({"benchmark": "acceptance", "AL": _acceptance_lengths(rows)}))
    return same == asked


def _chosen(suite: Suite, settings: Settings) -> Suite:
    prompts = suite.prompts[:: settings.stride][: settings.prompts]
    return replace(suite, prompts=tuple(replace(prompt, turns=prompt.turns[: settings.turns]) for prompt in prompts))


def _measure(
    settings: Settings, suites: dict[str, tuple[Prompt, ...]], pairs: dict[str, Pair], console: Console
) -> list[Row]:
    pair, conditions, together = next(iter(pairs.values())), settings.conditions(), max(settings.concurrency)
    longest = longest_context(pair, [prompt for prompts in suites.values() for prompt in prompts], settings.tokens)
    plain = pair.engine(None, longest, together)
    contenders = [
        Contender(name, each.engine(shape, longest, together))
        for name, each in pairs.items()
        for shape in settings.shapes
    ]
    asked = {"tokens": settings.tokens, "seed": settings.seed, "repeats": settings.repeats}
    return sweep_with_progress(console, plain, contenders, suites, conditions, pair, **asked)


def _look_closer(
    settings: Settings,
    suites: dict[str, tuple[Prompt, ...]],
    pairs: dict[str, Pair],
    rows: list[Row],
    costs: StepCosts | None,
    console: Console,
) -> tuple[dict[str, Any], dict[str, Recording]]:
    pair = next(iter(pairs.values()))
    longest = longest_context(pair, [prompt for prompts in suites.values() for prompt in prompts], settings.tokens)
    with console.status("recording, and measuring what a step costs"):
        costs = costs or measure(pair, max(settings.concurrency), longest // 2)
        tokens, seed, conditions = settings.tokens, settings.seed, settings.conditions()
        found = look_closer(pairs, suites, conditions, rows, costs, tokens=tokens, seed=seed, longest=longest)
    print_closer_look(console, found[0])
    return found


def longest_context(pair: Pair, prompts: list[Prompt], tokens: int) -> int:
    """Tokens that a conversation over all turns of any prompt can need."""
    # The next prompt may spell an answer's text with more tokens than the model did, so there is room for that.
    return min(
        pair.target.config.max_position,
        max(sum(len(pair.render(turn)) + 2 * tokens for turn in prompt.turns) for prompt in prompts),
    )


def _write(result: dict[str, Any], recordings: dict[str, Recording], outputs: Outputs, console: Console) -> None:
    if outputs.json is not None:
        write_json(outputs.json, result)
        console.print(f"written: {outputs.json}")
    if outputs.report is not None:
        write_report(result, outputs.report, recordings)
        console.print(f"written: {outputs.report / 'report.html'}")


def _acceptance_lengths(rows: list[Row]) -> dict[str, dict[str, float | None]]:
    """AL by suite, then by engine and condition."""
    several = len({row.draft for row in rows}) > 1
    lengths: dict[str, dict[str, float | None]] = {}
    for row in rows:
        length, name = row.acceptance.length, f"{row.draft}: {row.label}" if several else row.label
        lengths.setdefault(row.suite, {})[f"{name}, {row.condition}"] = length and round(length, 4)
    return lengths
