"""Every prompt answered by plain decoding and by each speculative engine: what was accepted, the time, the same text?

The engines take turns prompt by prompt, so a machine whose speed drifts slows all of them alike. Sampled answers use
one seed for all engines: speculation must not change a single token, just as with greedy decoding.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from serve.engine import Engine
from serve.request import Completion, SamplingParams
from serve.tree import TreeConfig
from spec.bench.statistics import NOTHING, Acceptance, measure
from spec.pair import Pair
from spec.suites import Prompt

TOP_P, TOP_K = 0.95, 40  # MiniMax-M3's own sampling defaults; they hold at every temperature above 0


@dataclass(frozen=True)
class Condition:
    """How prompts are asked: the filters hold above temperature 0; `concurrency` requests are answered together."""

    temperature: float
    top_p: float = TOP_P
    top_k: int = TOP_K
    thinking: bool = False
    concurrency: int = 1

    def params(self, tokens: int, seed: int) -> SamplingParams:
        if self.temperature == 0:
            return SamplingParams(temperature=0.0, max_tokens=tokens)
        return SamplingParams(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=seed, max_tokens=tokens
        )

    def __str__(self) -> str:
        words = [f"T = {self.temperature:g}"]
        words += ["thinking"] if self.thinking else []
        words += [f"{self.concurrency} at a time"] if self.concurrency > 1 else []
        return ", ".join(words)


def sampling_params(temperature: float, tokens: int, seed: int) -> SamplingParams:
    """Greedy at temperature 0, else sampled with M3's filters."""
    return Condition(temperature).params(tokens, seed)


def short_name(shape: TreeConfig) -> str:
    """For narrow tables: "chain 3", "tree 5,4,24" as depth, width, nodes, or "static 5,24" as depth, nodes."""
    if shape.width == 1:
        return f"chain {shape.depth}"
    return f"static {shape.depth},{shape.nodes}" if shape.paths else f"tree {shape.depth},{shape.width},{shape.nodes}"


@dataclass(frozen=True)
class Contender:
    """A speculative engine, with the name of its draft."""

    draft: str
    engine: Engine

    @property
    def label(self) -> str:
        return short_name(self.engine.tree)


@dataclass(frozen=True)
class Time:
    """Seconds of whole requests, and what prefill, drafting and verifying take of them."""

    total: float = 0.0
    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0

    @property
    def decode(self) -> float:
        """What follows the prefill."""
        return self.total - self.prefill

    @property
    def other(self) -> float:
        """Scheduling, sampling parameters, Python."""
        return self.total - self.prefill - self.draft - self.verify

    def __add__(self, other: "Time") -> "Time":
        return Time(
            self.total + other.total,
            self.prefill + other.prefill,
            self.draft + other.draft,
            self.verify + other.verify,
        )

    def __truediv__(self, parts: int) -> "Time":
        return Time(self.total / parts, self.prefill / parts, self.draft / parts, self.verify / parts)

    def to_json(self) -> dict[str, float]:
        names = ("total", "prefill", "draft", "verify", "other")
        return {name: round(getattr(self, name), 6) for name in names}


@dataclass(frozen=True)
class Answer:
    """One turn of one prompt, answered once. `identical`: as plain decoding answered it. Requests that were answered
    together share their time evenly.
    """

    prompt: str
    category: str
    turn: int
    seed: int
    acceptance: Acceptance
    tokens: int
    identical: bool
    time: Time
    plain_time: Time


@dataclass(frozen=True)
class Row:
    """One suite answered by one engine under one condition."""

    suite: str
    draft: str
    label: str
    shape: TreeConfig
    condition: Condition
    answers: tuple[Answer, ...]

    @cached_property
    def acceptance(self) -> Acceptance:
        return sum((answer.acceptance for answer in self.answers), NOTHING)

    @cached_property
    def time(self) -> Time:
        return sum((answer.time for answer in self.answers), Time())

    @cached_property
    def plain_time(self) -> Time:
        return sum((answer.plain_time for answer in self.answers), Time())

    @property
    def temperature(self) -> float:
        return self.condition.temperature

    @property
    def prompts(self) -> int:
        return len({answer.prompt for answer in self.answers})

    @property
    def identical(self) -> int:
        return sum(answer.identical for answer in self.answers)

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def speed_up(self) -> float:
        return self.plain_time.total / self.time.total

    @property
    def decode_speed_up(self) -> float:
        return self.plain_time.decode / self.time.decode


def sweep(
    plain: Engine,
    contenders: Sequence[Contender],
    suites: Mapping[str, Sequence[Prompt]],
    conditions: Sequence[Condition],
    pair: Pair,
    *,
    tokens: int,
    seed: int,
    repeats: int = 1,
    advance: Callable[[str, int], None],
) -> Iterator[Row]:
    """A row for each suite, condition and contender.

    Prompt i of n is sampled with seed + i, in repeat r with seed + i + r * n; greedy answers are not repeated. A second
    turn continues the plain answer, which a lossless engine has served too. `advance` is told what was asked and how
    many prompts all have answered.
    """
    warm_up = pair.render(next(iter(suites.values()))[0].turns[0])
    for engine in (plain, *(contender.engine for contender in contenders)):
        # The first call of an engine pays for what later ones reuse.
        engine.generate([warm_up], sampling_params(1.0, 4, seed))
    for suite, prompts in suites.items():
        for condition in conditions:
            answers: list[list[Answer]] = [[] for _ in contenders]
            for repeat in range(repeats if condition.temperature else 1):
                seeded = [(prompt, seed + repeat * len(prompts) + i) for i, prompt in enumerate(prompts)]
                for start in range(0, len(prompts), condition.concurrency):
                    group = seeded[start : start + condition.concurrency]
                    for asked in _ask(plain, contenders, group, condition, pair, tokens):
                        for collected, answer in zip(answers, asked, strict=True):
                            collected.append(answer)
                    advance(f"{suite}, {condition}", len(group))
            for contender, collected in zip(contenders, answers, strict=True):
                shape = contender.engine.tree
                yield Row(suite, contender.draft, contender.label, shape, condition, tuple(collected))


def sweep_with_progress(
    console: Console,
    plain: Engine,
    contenders: Sequence[Contender],
    suites: Mapping[str, Sequence[Prompt]],
    conditions: Sequence[Condition],
    pair: Pair,
    *,
    tokens: int,
    seed: int,
    repeats: int = 1,
) -> list[Row]:
    """The rows of `sweep`, with a bar while they are measured."""
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        asked = sum(repeats if condition.temperature else 1 for condition in conditions)
        task = progress.add_task("warming up", total=asked * sum(map(len, suites.values())))

        def advance(label: str, count: int) -> None:
            progress.update(task, advance=count, description=label)

        settings = {"tokens": tokens, "seed": seed, "repeats": repeats, "advance": advance}
        return list(sweep(plain, contenders, suites, conditions, pair, **settings))


def _ask(
    plain: Engine,
    contenders: Sequence[Contender],
    group: list[tuple[Prompt, int]],
    condition: Condition,
    pair: Pair,
    tokens: int,
) -> Iterator[list[Answer]]:
    """Asks prompts together, turn after turn; yields each answer of all contenders."""
    talks: list[list[dict[str, str]]] = [[] for _ in group]
    for turn in range(max(len(prompt.turns) for prompt, _ in group)):
        places = [place for place, (prompt, _) in enumerate(group) if turn < len(prompt.turns)]
        for place in places:
            talks[place].append({"role": "user", "content": group[place][0].turns[turn]})
        asked = [pair.render_conversation(talks[place], condition.thinking) for place in places]
        params = [condition.params(tokens, group[place][1]) for place in places]
        expected, plain_time = _timed(plain, asked, params)
        given = [_timed(contender.engine, asked, params) for contender in contenders]
        for order, place in enumerate(places):
            (prompt, seed), wanted = group[place], expected[order]
            common = (prompt.id, prompt.category, turn + 1, seed)
            yield [
                Answer(*common, *_compared(contender, completions[order], wanted), spent, plain_time)
                for contender, (completions, spent) in zip(contenders, given, strict=True)
            ]
            talks[place].append(pair.answer_message(wanted.token_ids, condition.thinking))


def _compared(contender: Contender, completion: Completion, wanted: Completion) -> tuple[Acceptance, int, bool]:
    same = (completion.token_ids, completion.finish_reason) == (wanted.token_ids, wanted.finish_reason)
    return measure(completion.steps, contender.engine.tree.depth), len(completion.token_ids), same


def _timed(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[list[Completion], Time]:
    """The answers, and each one's share of the time."""
    before, start = engine.stats(), time.perf_counter()
    completions = engine.generate(prompts, params)
    total, after = time.perf_counter() - start, engine.stats()
    parts = (after[f"{part}_seconds"] - before[f"{part}_seconds"] for part in ("prefill", "draft", "verify"))
    return completions, Time(total, *parts) / len(prompts)
