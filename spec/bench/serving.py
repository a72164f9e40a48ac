"""`spec bench serve`: latency, throughput and acceptance of any OpenAI-compatible server, seen from a client."""

import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from spec.bench.health import Health, watch_health
from spec.bench.percentiles import PERCENTILES, spread
from spec.bench.server_counters import Drafting, read_drafting
from spec.streaming import ServerError, connect, find_model, stream_chat
from spec.suites import load_suite
from target_model.errors import UserError, write_json

DEFINITIONS = {
    "TTFT": "from sending a request to its first text",
    "ITL": "between two chunks with text; a speculating server sends several tokens in one",
    "TPOT": "time per output token after the first chunk: (end of text - first text) / (tokens - 1)",
    "E2E": "from sending a request to the end of its stream",
    "accepted/drafted": "of the drafted tokens that were verified, the share kept (usage details of the answers)",
    "AL": "accepted drafted tokens per verify step, plus 1 (the server's own counters in /metrics)",
}


@dataclass(frozen=True)
class Settings:
    """What to send. `rate`: mean requests a second, their gaps exponential; None: `concurrency` at a time."""

    url: str
    model: str | None
    suites: tuple[str, ...]
    requests: int
    concurrency: int
    rate: float | None
    tokens: int
    warm_up: int
    temperature: float | None
    seed: int
    timeout: float
    health_mb: int

    def body(self, model: str, prompt: str, index: int) -> dict[str, Any]:
        sampling = {} if self.temperature is None else {"temperature": self.temperature}
        return {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.tokens,
            "seed": self.seed + index,
            "stream_options": {"include_usage": True},
            **sampling,
        }


@dataclass
class Record:
    """One request. Times in seconds; `gaps` are those between its chunks with text. tokens: as the server counted,
    without its word one a chunk.
    """

    sent: float
    first: float | None = None
    last: float | None = None
    end: float | None = None
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    tokens: int = 0
    counted: bool = False
    accepted: int | None = None
    drafted: int | None = None
    error: str | None = None

    def take(self, chunk: dict[str, Any], now: float) -> None:
        deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or []]
        if any(delta.get(name) for delta in deltas for name in ("content", "reasoning_content", "reasoning")):
            if self.first is None:
                self.first = now
            else:
                self.gaps.append(now - self.last)
            self.last = now
            self.tokens += not self.counted
        if chunk.get("usage"):
            self._take_usage(chunk["usage"])

    def _take_usage(self, usage: dict[str, Any]) -> None:
        self.tokens, self.counted = usage["completion_tokens"], True
        self.prompt_tokens = usage["prompt_tokens"]
        details = usage.get("completion_tokens_details") or {}
        accepted, rejected = (details.get(f"{kind}_prediction_tokens") for kind in ("accepted", "rejected"))
        if accepted is not None and rejected is not None:
            self.accepted, self.drafted = accepted, accepted + rejected

    @property
    def per_token(self) -> float | None:
        return (self.last - self.first) / (self.tokens - 1) if self.first is not None and self.tokens > 1 else None


@dataclass(frozen=True)
class Result:
    """Everything measured. `drafting`: what the server's own counters say, None where it has none."""

    records: list[Record]
    seconds: float
    drafting: Drafting | None
    health: Health | None

    @property
    def good(self) -> list[Record]:
        return [record for record in self.records if record.error is None]

    def summary(self) -> dict[str, Any]:
        good = self.good
        tokens, prompt_tokens = sum(record.tokens for record in good), sum(r.prompt_tokens or 0 for r in good)
        verified = [record for record in good if record.drafted]
        accepted, drafted = sum(r.accepted for r in verified), sum(r.drafted for r in verified)
        return {
            "requests": len(self.records),
            "failed": len(self.records) - len(good),
            "seconds": round(self.seconds, 3),
            "requests_per_second": round(len(good) / self.seconds, 3),
            "output_tokens_per_second": round(tokens / self.seconds, 2),
            "total_tokens_per_second": round((tokens + prompt_tokens) / self.seconds, 2),
            "output_tokens": tokens,
            "tokens_counted_by": "server" if all(record.counted for record in good) else "chunks",
            "ttft_ms": spread([r.first - r.sent for r in good if r.first is not None]),
            "itl_ms": spread([gap for record in good for gap in record.gaps]),
            "tpot_ms": spread([r.per_token for r in good if r.per_token is not None]),
            "e2e_ms": spread([record.end - record.sent for record in good]),
            "accepted_tokens": accepted if verified else None,
            "drafted_tokens": drafted if verified else None,
            "acceptance_rate": round(accepted / drafted, 4) if verified else None,
            "verify_steps": self.drafting and self.drafting.steps,
            "acceptance_length": self.drafting and self.drafting.length,
            "health": self.health and self.health.summary(),
        }


def run(settings: Settings, api_key: str | None, json_path: Path | None) -> bool:
    """Measures, prints, writes `json_path`, and prints one JSON line last. False when a request failed."""
    prompts = [prompt.turns[0] for name in settings.suites for prompt in load_suite(name).prompts]
    result, model = asyncio.run(measure(settings, prompts, api_key))
    errors = [record.error for record in result.records if record.error is not None]
    if not result.good:
        raise UserError(f"all {len(errors)} requests failed; the first: {errors[0]}")
    summary = {"benchmark": "serve", "model": model, **result.summary()}
    _print(Console(), summary, errors)
    if json_path is not None:
        whole = {**summary, "settings": asdict(settings), "definitions": DEFINITIONS}
        write_json(json_path, {**whole, "records": [asdict(record) for record in result.records]})
    print(json.dumps(summary))
    return not errors


async def measure(settings: Settings, prompts: list[str], api_key: str | None) -> tuple[Result, str]:
    """Warms up, then sends every request once. UserError when the server cannot be reached or the warm-up fails."""
    async with connect(settings.url, api_key, settings.timeout) as http:
        model = await find_model(http, settings.model)
        bodies = [
            settings.body(model, prompts[index % len(prompts)], index)
            for index in range(settings.warm_up + settings.requests)
        ]
        warm = [await _send(http, body, settings.timeout) for body in bodies[: settings.warm_up]]
        failed = next((record.error for record in warm if record.error is not None), None)
        if failed is not None:
            raise UserError(f"the warm-up failed: {failed}")
        before = await read_drafting(http)
        health = None
        if settings.health_mb:
            health = asyncio.create_task(watch_health(http, model, settings.health_mb))
        started = time.perf_counter()
        try:
            records = await _send_all(http, bodies[settings.warm_up :], settings)
            seconds = time.perf_counter() - started
            seen = await health if health is not None else None
        finally:
            if health is not None:
                health.cancel()
        accepted = sum(record.accepted or 0 for record in records)
        drafting = before and await before.change(http, accepted)
        return Result(records, seconds, drafting, seen), model


async def _send_all(http: httpx.AsyncClient, bodies: list[dict[str, Any]], settings: Settings) -> list[Record]:
    places = asyncio.Semaphore(len(bodies) if settings.rate is not None else settings.concurrency)

    async def one(body: dict[str, Any]) -> Record:
        async with places:
            return await _send(http, body, settings.timeout)

    chance, tasks = random.Random(settings.seed), []
    async with asyncio.TaskGroup() as group:
        for body in bodies:
            if settings.rate is not None and tasks:
                await asyncio.sleep(chance.expovariate(settings.rate))
            tasks.append(group.create_task(one(body)))
    return [task.result() for task in tasks]


async def _send(http: httpx.AsyncClient, body: dict[str, Any], timeout: float) -> Record:
    record = Record(time.perf_counter())
    try:
        async with asyncio.timeout(timeout):
            async for chunk in stream_chat(http, body):
                record.take(chunk, time.perf_counter())
    except ServerError as error:
        record.error = str(error)
    except TimeoutError:
        record.error = f"no end after {timeout:g} s"
    except (AttributeError, KeyError, TypeError) as error:
        record.error = f"a chunk of the stream is not OpenAI's: {error}"
    record.end = time.perf_counter()
    return record


def _print(console: Console, summary: dict[str, Any], errors: list[str]) -> None:
    table = Table(title=f"{summary['model']}, {summary['requests']} requests", title_justify="left", box=None)
    table.add_column("milliseconds")
    columns = ("mean", *(f"p{share}" for share in PERCENTILES), "max")
    for heading in columns:
        table.add_column(heading, justify="right")
    health = summary["health"] or {}
    rows = {name.upper(): summary[f"{name}_ms"] for name in ("ttft", "itl", "tpot", "e2e")}
    for name, figures in {**rows, "/health meanwhile": health.get("answer_ms")}.items():
        if figures is not None:
            table.add_row(name, *(f"{figures[heading]:.1f}" for heading in columns))
    console.print(table)
    names = ("requests_per_second", "output_tokens_per_second", "total_tokens_per_second")
    figures = {name.replace("_", " "): summary[name] for name in names}
    figures |= {"accepted/drafted": summary["acceptance_rate"], "AL": summary["acceptance_length"]}
    for name, value in figures.items():
        console.print(f"{name}: {'n/a' if value is None else value}", highlight=False)
    if health:
        console.print(f"{health['megabytes']} MB tokenised in {health['tokenise_seconds']} s", highlight=False)
    for word, meaning in DEFINITIONS.items():
        console.print(f"[bold]{word}[/]: {meaning}", style="dim", highlight=False)
    for error in dict.fromkeys(errors):
        console.print(f"failed, {errors.count(error)} times: {error}", style="red", highlight=False, markup=False)
