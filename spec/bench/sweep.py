"""Every prompt answered by plain decoding and by each speculative engine: what was accepted, the time, the same text?

The engines take turns prompt by prompt, so a machine whose speed drifts slows all of them alike. Sampled answers use
one seed for all engines: speculation must not change a single token, just as with greedy decoding.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from serve.engine import Engine
from serve.request import Completion, SamplingParams, StepRecord
from serve.tree import TreeConfig
from spec.bench.statistics import Acceptance, measure

TOP_P, TOP_K = 0.95, 40  # MiniMax-M3's own sampling defaults; they hold at every temperature above 0


def sampling_params(temperature: float, tokens: int, seed: int) -> SamplingParams:
    """Greedy at temperature 0, else sampled with M3's filters."""
    if temperature == 0:
        return SamplingParams(temperature=0.0, max_tokens=tokens)
    return SamplingParams(temperature=temperature, top_p=TOP_P, top_k=TOP_K, seed=seed, max_tokens=tokens)


def short_name(shape: TreeConfig) -> str:
    """For narrow tables: "chain 3", or "tree 5,4,24" as depth, width, nodes."""
    return f"chain {shape.depth}" if shape.width == 1 else f"tree {shape.depth},{shape.width},{shape.nodes}"


@dataclass(frozen=True)
class Time:
    """Seconds of whole requests, and of what follows the prefill."""

    total: float = 0.0
    decode: float = 0.0

    def __add__(self, other: "Time") -> "Time":
        return Time(self.total + other.total, self.decode + other.decode)


@dataclass(frozen=True)
class Row:
    """One suite answered by one engine at one temperature.

    Tokens and times are sums over the prompts; `identical` counts the answers that equal the plain ones.
    """

    suite: str
    label: str
    temperature: float
    shape: TreeConfig
    acceptance: Acceptance
    prompts: int
    identical: int
    tokens: int
    time: Time
    plain_time: Time

    @property
    def speed_up(self) -> float:
        return self.plain_time.total / self.time.total

    @property
    def decode_speed_up(self) -> float:
        return self.plain_time.decode / self.time.decode

    def to_json(self) -> dict:
        return {
            "suite": self.suite,
            "label": self.label,
            "temperature": self.temperature,
            "tree": asdict(self.shape),
            **self.acceptance.to_json(),
            "prompts": self.prompts,
            "identical_to_plain": self.identical,
            "tokens": self.tokens,
            "seconds": self.time.total,
            "plain_seconds": self.plain_time.total,
            "speed_up": self.speed_up,
            "decode_seconds": self.time.decode,
            "plain_decode_seconds": self.plain_time.decode,
            "decode_speed_up": self.decode_speed_up,
        }


def sweep(
    plain: Engine,
    drafted: Mapping[str, Engine],
    suites: Mapping[str, Sequence[list[int]]],
    temperatures: Sequence[float],
    *,
    tokens: int,
    seed: int,
    advance: Callable[[str], None],
) -> Iterator[Row]:
    """Measures suites (name -> prompts as token ids): a row for each suite, temperature and labelled engine.

    Prompt i is sampled with seed + i. `advance` is called with a label after every prompt that all have answered.
    """
    warm_up = next(iter(suites.values()))[0]
    for engine in (plain, *drafted.values()):
        # The first call of an engine pays for what later ones reuse.
        engine.generate([warm_up], sampling_params(1.0, 4, seed))
    for suite, prompts in suites.items():
        for temperature in temperatures:
            totals = {label: _Totals() for label in drafted}
            for index, prompt in enumerate(prompts):
                params = sampling_params(temperature, tokens, seed + index)
                expected, plain_time = _timed(plain, prompt, params)
                for label, engine in drafted.items():
                    completion, spent = _timed(engine, prompt, params)
                    totals[label].add(completion, spent, expected, plain_time)
                advance(f"{suite}, T = {temperature:g}")
            for label, total in totals.items():
                yield total.row(suite, label, temperature, drafted[label].tree)


class _Totals:
    """Sums over the prompts of one row."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.prompts = self.identical = self.tokens = 0
        self.time = self.plain_time = Time()

    def add(self, completion: Completion, spent: Time, expected: Completion, plain_time: Time) -> None:
        self.steps += completion.steps
        self.prompts += 1
        same_end = completion.finish_reason == expected.finish_reason
        self.identical += same_end and completion.token_ids == expected.token_ids
        self.tokens += len(completion.token_ids)
        self.time += spent
        self.plain_time += plain_time

    def row(self, suite: str, label: str, temperature: float, shape: TreeConfig) -> Row:
        return Row(
            suite,
            label,
            temperature,
            shape,
            measure(self.steps, shape.depth),
            self.prompts,
            self.identical,
            self.tokens,
            self.time,
            self.plain_time,
        )


def _timed(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[Completion, Time]:
    prefill, start = engine.stats()["prefill_seconds"], time.perf_counter()
    (completion,) = engine.generate([prompt], params)
    total = time.perf_counter() - start
    return completion, Time(total, total - (engine.stats()["prefill_seconds"] - prefill))
