"""`spec bench acceptance`: how many drafted tokens the target keeps, for chains and trees, greedy and sampled."""

import json
import platform
import shlex
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from serve.request import SamplingParams
from serve.tree import TreeConfig
from spec import __version__
from spec.bench.statistics import DEFINITIONS
from spec.bench.sweep import TOP_K, TOP_P, Row, short_name, sweep
from spec.bench.tables import print_definitions, print_rows
from spec.pair import load_pair
from spec.suites import load_suite
from target_model.errors import UserError, atomic_write

MAX_CHAIN = 16


@dataclass(frozen=True)
class Settings:
    """What to measure; see `spec bench acceptance --help`."""

    target: str
    draft: str
    suites: tuple[str, ...]
    prompts: int
    tokens: int
    shapes: tuple[TreeConfig, ...]
    temperatures: tuple[float, ...]
    thinking: bool
    seed: int
    device: str


def parse_shapes(chain: str, trees: list[str] | None) -> tuple[TreeConfig, ...]:
    """Chains from "1..7", "1,3" or "none"; trees from "depth,width,nodes" texts, ["none"] for no tree, None for the
    server's default."""
    shapes = [] if chain == "none" else [TreeConfig.chain(length) for length in _chain_lengths(chain)]
    for text in [None] if trees is None else trees:
        if text != "none":
            shapes.append(TreeConfig() if text is None else TreeConfig.parse(text))
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
            f"--chain must be like 3, 1..7, 1,3,5 or none, with lengths from 1 to {MAX_CHAIN}; got {text!r}"
        )
    return lengths


def parse_temperatures(text: str) -> tuple[float, ...]:
    """Comma separated temperatures. 1 is always in the result: small models loop under greedy decoding, which flatters
    acceptance."""
    try:
        temperatures = {float(part) for part in text.split(",")}
    except ValueError:
        raise UserError(f"--temperature must be numbers separated by commas, for example 0,1; got {text!r}") from None
    for temperature in temperatures:
        SamplingParams(temperature=temperature)  # refuses negative and infinite ones
    return tuple(sorted(temperatures | {1.0}))


def run(settings: Settings, json_path: Path | None) -> list[Row]:
    """Measures, prints tables and definitions, writes `json_path`, and prints one JSON line last."""
    console = Console()
    loaded = [load_suite(name, settings.prompts) for name in settings.suites]
    if json_path is not None:
        _check_writable(json_path)
    pair = load_pair(settings.target, settings.draft, settings.device)
    console.print(pair.description)
    suites = {
        suite.name: [pair.render(prompt.turns[0], settings.thinking) for prompt in suite.prompts] for suite in loaded
    }
    longest = settings.tokens + max(len(prompt) for prompts in suites.values() for prompt in prompts)
    plain = pair.engine(None, longest)
    drafted = {short_name(shape): pair.engine(shape, longest) for shape in settings.shapes}
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console, transient=True) as progress:
        total = len(settings.temperatures) * sum(len(prompts) for prompts in suites.values())
        task = progress.add_task("warming up", total=total)

        def advance(label: str) -> None:
            progress.update(task, advance=1, description=label)

        tokens, seed = settings.tokens, settings.seed
        rows = list(sweep(plain, drafted, suites, settings.temperatures, tokens=tokens, seed=seed, advance=advance))
    print_rows(console, rows)
    print_definitions(console)
    if json_path is not None:
        with atomic_write(json_path, "w") as file:
            json.dump(report(rows, settings, pair.description), file, indent=1)
        console.print(f"written: {json_path}")
    print(json.dumps({"benchmark": "acceptance", "AL": _acceptance_lengths(rows)}))
    return rows


def _check_writable(path: Path) -> None:
    """A path that cannot be written is better found before the minutes of measuring."""
    if path.is_dir():
        raise UserError(f"{path} is a directory, not a file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path.parent).close()


def report(rows: list[Row], settings: Settings, pair: str) -> dict:
    """Everything measured, with what is needed to read it and to repeat it."""
    return {
        "benchmark": "acceptance",
        "command": shlex.join(["spec", *sys.argv[1:]]),
        "settings": asdict(settings) | {"top_p": TOP_P, "top_k": TOP_K},
        "pair": pair,
        "definitions": DEFINITIONS,
        "versions": {"spec": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {"platform": platform.platform(), "threads": torch.get_num_threads()},
        "rows": [row.to_json() for row in rows],
    }


def _acceptance_lengths(rows: list[Row]) -> dict[str, dict[str, float | None]]:
    """AL by suite, then by engine and temperature."""
    lengths: dict[str, dict[str, float | None]] = {}
    for row in rows:
        length = row.acceptance.length
        lengths.setdefault(row.suite, {})[f"{row.label}, T = {row.temperature:g}"] = length and round(length, 4)
    return lengths
