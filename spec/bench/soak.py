"""`spec bench soak`: many streams at once, some of which hang up, for as long as one likes; nothing may be left behind.

Every answer that is read to its end must be the one that the same request gets alone, and of an answer that is given up
what was read must be its beginning. Afterwards nothing runs or waits, and all pages of the cache are free again (what
the server says of them in /stats; "n/a" where it has none).
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
from rich.console import Console

from spec.streaming import ServerError, connect, find_model, stream_chat
from spec.suites import load_suite
from target_model.errors import UserError

IDLE_PATIENCE = 30.0  # seconds that a server has to become idle again


@dataclass(frozen=True)
class Settings:
    """abort: share of the streams that hang up early. different: how many different requests are sent."""

    url: str
    model: str | None
    suite: str
    streams: int
    seconds: float
    abort: float
    different: int
    tokens: int
    seed: int
    timeout: float


@dataclass(frozen=True)
class State:
    """What a server says of itself: requests in it, and pages that no request holds."""

    requests: int
    free_pages: int
    total_pages: int


@dataclass
class Counts:
    """What became of the streams. different: not the answer that the request gets alone; stuck: no end in time."""

    finished: int = 0
    aborted: int = 0
    refused: int = 0
    failed: int = 0
    stuck: int = 0
    different: int = 0
    chunks: int = 0
    errors: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Said:
    """One answer, or its beginning when `finish` is None."""

    text: str
    finish: str | None


def run(settings: Settings, api_key: str | None) -> bool:
    """Runs, prints what happened and one JSON line last. False when anything went wrong."""
    summary, problems = asyncio.run(soak(settings, api_key))
    console = Console()
    for name, value in summary.items():
        console.print(f"{name.replace('_', ' ')}: {'n/a' if value is None else value}", highlight=False, markup=False)
    for problem in problems:
        console.print(problem, style="red", highlight=False, markup=False)
    print(json.dumps({"benchmark": "soak", **summary, "settings": asdict(settings)}))
    return not problems


async def soak(settings: Settings, api_key: str | None) -> tuple[dict[str, Any], list[str]]:
    """The figures, and a line for each thing that is wrong."""
    prompts = [prompt.turns[0] for prompt in load_suite(settings.suite).prompts]
    async with connect(settings.url, api_key, settings.timeout) as http:
        model = await find_model(http, settings.model)
        bodies = [
            {
                "model": model,
                "messages": [{"role": "user", "content": prompts[index % len(prompts)]}],
                "max_tokens": settings.tokens,
                "seed": settings.seed + index,
            }
            for index in range(settings.different)
        ]
        alone = [await _alone(http, body) for body in bodies]
        before, crowd = await _state(http), _Crowd(http, settings, bodies, alone)
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(settings.streams):
                group.create_task(crowd.stream(number, started + settings.seconds))
        seconds = time.perf_counter() - started
        after, waited = await _idle(http)
        again = [await _alone(http, body) for body in bodies]
    changed = sum(one != other for one, other in zip(alone, again, strict=True))
    summary = {
        "seconds": round(seconds, 1),
        "streams": settings.streams,
        **{name: value for name, value in asdict(crowd.counts).items() if name != "errors"},
        "answers_changed_afterwards": changed,
        "free_pages_before": before and before.free_pages,
        "free_pages_after": after and after.free_pages,
        "seconds_until_idle": waited,
    }
    return summary, _problems(crowd.counts, before, after, changed)


def _problems(counts: Counts, before: State | None, after: State | None, changed: int) -> list[str]:
    problems = [
        f"{value} streams {word}"
        for value, word in (
            (counts.failed, "failed"),
            (counts.stuck, "were stuck"),
            (counts.different, "differ from the answer of the request alone"),
        )
        if value
    ]
    problems += sorted(counts.errors)
    if changed:
        problems.append(f"{changed} requests alone are answered otherwise afterwards")
    if not counts.finished:
        problems.append("no stream came to its end")
    if before is not None and after is not None:
        if after.requests:
            problems.append(f"{after.requests} requests are still in the server")
        if after.free_pages != after.total_pages:
            problems.append(f"{after.total_pages - after.free_pages} pages are not free again")
    return problems


async def _alone(http: httpx.AsyncClient, body: dict[str, Any]) -> Said:
    said = [part async for part in _read(http, body)]
    if not said or said[-1].finish is None:
        raise UserError("a request alone got no whole answer")
    return said[-1]


async def _read(http: httpx.AsyncClient, body: dict[str, Any]) -> AsyncGenerator[Said, None]:
    """The answer so far, after each chunk."""
    text, finish = "", None
    async with aclosing(stream_chat(http, body)) as chunks:
        async for chunk in chunks:
            for choice in chunk.get("choices") or []:
                delta = choice.get("delta") or {}
                text += (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")
                finish = choice.get("finish_reason") or finish
            yield Said(text, finish)


@dataclass
class _Crowd:
    """The streams, each of which asks one request after the other until the deadline."""

    http: httpx.AsyncClient
    settings: Settings
    bodies: list[dict[str, Any]]
    alone: list[Said]
    counts: Counts = field(default_factory=Counts)

    async def stream(self, number: int, deadline: float) -> None:
        chance = random.Random(f"{self.settings.seed} {number}")
        while time.perf_counter() < deadline:
            index = chance.randrange(len(self.bodies))
            chunks = patience = None
            if chance.random() < self.settings.abort:
                # Some hang up while their prompt waits or is computed, some between chunks.
                if chance.random() < 0.5:
                    patience = chance.expovariate(2.0)
                else:
                    chunks = chance.randrange(1, 12)
            try:
                said = await self._one(self.bodies[index], chunks, patience)
            except ServerError as error:
                self._refused(str(error))
                await asyncio.sleep(0.05)
            else:
                self._compare(said, self.alone[index])

    async def _one(self, body: dict[str, Any], chunks: int | None, patience: float | None) -> Said:
        """What was read until the end, or until the client hung up: after so many chunks, or seconds."""
        said, seen = Said("", None), 0
        try:
            async with asyncio.timeout(patience or self.settings.timeout), aclosing(_read(self.http, body)) as parts:
                async for part in parts:
                    said, seen = part, seen + 1
                    if seen == chunks:
                        break
        except TimeoutError:
            self.counts.stuck += patience is None
        self.counts.chunks += seen
        return said

    def _compare(self, said: Said, whole: Said) -> None:
        ended = said.finish is not None
        self.counts.finished += ended
        self.counts.aborted += not ended
        self.counts.different += not (said == whole if ended else whole.text.startswith(said.text))

    def _refused(self, error: str) -> None:
        """A full server may say so; anything else is a failure."""
        full = error.startswith("429")
        self.counts.refused += full
        self.counts.failed += not full
        if not full:
            self.counts.errors.add(error)


async def _state(http: httpx.AsyncClient) -> State | None:
    """What /stats says, None where there is no such thing."""
    try:
        response = await http.get("/stats")
        engine = response.json()["engine"]
        requests = engine["running"] + engine["waiting"] + engine["open_requests"]
        return State(requests, engine["pages_free"] + engine["pages_cached"], engine["pages_total"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


async def _idle(http: httpx.AsyncClient) -> tuple[State | None, float | None]:
    """The state once nothing is left in the server, or when patience ends; and the seconds that it took."""
    started = time.perf_counter()
    while (state := await _state(http)) is not None and time.perf_counter() < started + IDLE_PATIENCE:
        if not state.requests and state.free_pages == state.total_pages:
            break
        await asyncio.sleep(0.02)
    return state, None if state is None else round(time.perf_counter() - started, 3)
