"""Counters, gauges and histograms for Prometheus, under the names people know from other servers with the prefix
`spec_`."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.answer import Answer
from serve.async_engine import AsyncEngine
from serve.counts import Counts

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
_RECENT = 100
_COUNTED_HERE = frozenset(
    "verify_steps emitted_tokens drafted_tokens accepted_tokens accepted_per_depth accepted_histogram "
    "acceptance_length".split()
)


class Metrics:
    """What happened to the requests of one server. Only tokens within an answer count, nothing behind its end.

    `totals` are those of answers that have ended; what is shown counts the tokens of running ones as well.
    """

    def __init__(self, engine: AsyncEngine, model: str):
        self.registry = CollectorRegistry()
        self.totals = Counts()
        self.requests: dict[str, int] = {}
        self.prompt_tokens_total = 0
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self.started = time.time()
        self._running: set[Answer] = set()
        self._engine = engine
        self._model = model
        self._success = self._counter("request_success", "Finished answers.", "finished_reason")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._queued = self._histogram("request_queue_time_seconds", "From arrival to the first step.", _SECONDS)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _SECONDS
        )
        self._decode = self._histogram("request_decode_time_seconds", "From the first to the last token.", _SECONDS)
        self._between = self._histogram("inter_token_latency_seconds", "Time per token after the first.", _SECONDS)
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _SECONDS)
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self._answer_length = self._histogram("request_generation_tokens", "Tokens per answer.", _TOKENS)
        self.registry.register(_TokenCollector(self.counts, model))
        self.registry.register(_EngineCollector(engine, model))

    def begin(self, answer: Answer) -> None:
        self._running.add(answer)

    def counts(self) -> Counts:
        """Tokens and verify steps so far."""
        total = Counts()
        for counts in (self.totals, *(answer.counts for answer in self._running)):
            total.merge(counts)
        return total

    def observe(self, answer: Answer) -> None:
        """Counts an answer that has ended."""
        self._running.discard(answer)
        counts, reason = answer.counts, answer.finish_reason or "abort"
        prompt = len(answer.stream.request.prompt_ids)
        self.requests[reason] = self.requests.get(reason, 0) + 1
        self.prompt_tokens_total += prompt
        self.totals.merge(counts)
        self._success.labels(self._model, reason).inc()
        self._prompt_tokens.labels(self._model).inc(prompt)
        self._observe_times(answer)
        self._prompt_length.labels(self._model).observe(prompt)
        self._answer_length.labels(self._model).observe(counts.completion)
        seconds = time.perf_counter() - answer.arrived
        self.recent.append(
            {
                "id": answer.stream.request.id,
                "finish_reason": reason,
                "prompt_tokens": prompt,
                "seconds": round(seconds, 4),
                **counts_json(counts),
                "other_ms": round(1000 * (seconds - counts.draft_seconds - counts.verify_seconds), 3),
            }
        )

    def _observe_times(self, answer: Answer) -> None:
        self._whole.labels(self._model).observe(time.perf_counter() - answer.arrived)
        if answer.queue_seconds is not None:
            self._queued.labels(self._model).observe(answer.queue_seconds)
        if answer.arrivals and answer.queue_seconds is not None:
            first, last = answer.arrivals[0][0], answer.arrivals[-1][0]
            self._prefill.labels(self._model).observe(first - answer.stream.submitted - answer.queue_seconds)
            self._decode.labels(self._model).observe(last - first)
        before = answer.arrived
        for index, (arrived, tokens) in enumerate(answer.arrivals):
            if index == 0:
                self._first_token.labels(self._model).observe(arrived - before)
            else:
                # A step's tokens arrive together: each is given an equal share of the time.
                for _ in range(tokens):
                    self._between.labels(self._model).observe((arrived - before) / tokens)
            before = arrived

    def prometheus(self) -> bytes:
        return generate_latest(self.registry)

    def json(self) -> dict[str, Any]:
        """Everything `/stats` shows."""
        return {
            "model": self._model,
            "uptime_seconds": round(time.time() - self.started, 1),
            "requests": dict(self.requests),
            "prompt_tokens": self.prompt_tokens_total,
            **counts_json(self.counts()),
            "definitions": {
                "acceptance_length": "drafted tokens kept per verify step, plus 1 for the target's own (bonus) token",
                "accepted_per_position": "share of verify steps that kept a drafted token at depth 1, 2, ...",
                "accepted_histogram": "verify steps by the number of drafted tokens kept, from 0",
                "draft_ms, verify_ms": "the requests' shares of the time of their steps; other_ms: prefill, waiting, "
                "scheduling",
            },
            # Its own counts of tokens would disagree: they go on behind the stop strings of answers.
            "engine": {name: value for name, value in self._engine.stats().items() if name not in _COUNTED_HERE},
            "running": [{"id": answer.stream.request.id, **counts_json(answer.counts)} for answer in self._running],
            "recent": list(self.recent),
        }

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"spec_{name}", text, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"spec_{name}", text, ("model_name",), registry=self.registry, buckets=buckets)


def counts_json(counts: Counts) -> dict[str, Any]:
    """Token counts with the rates that follow from them; a rate without a verify step is null."""
    steps = counts.steps
    return {
        "completion_tokens": counts.completion,
        "cached_prompt_tokens": counts.cached,
        "verify_steps": steps,
        "drafted_tokens": counts.drafted,
        "accepted_tokens": counts.accepted,
        "acceptance_length": counts.acceptance_length,
        "acceptance_rate": counts.accepted / counts.drafted if counts.drafted else None,
        "accepted_per_position": [kept / steps for kept in counts.per_depth],
        "accepted_histogram": counts.histogram,
        "draft_ms": round(1000 * counts.draft_seconds, 3),
        "verify_ms": round(1000 * counts.verify_seconds, 3),
    }


class _TokenCollector(Collector):
    """Counts of tokens and verify steps, up to now."""

    def __init__(self, counts: Callable[[], Counts], model: str):
        self._counts, self._model = counts, model

    def collect(self) -> Iterable[Metric]:
        counts = self._counts()
        for name, text, value in (
            ("generation_tokens", "Tokens of answers.", counts.completion),
            ("spec_decode_num_drafts", "Verify steps.", counts.steps),
            ("spec_decode_num_draft_tokens", "Drafted tokens that were verified.", counts.drafted),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that became part of an answer.", counts.accepted),
        ):
            counter = CounterMetricFamily(f"spec_{name}", text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        by_depth = CounterMetricFamily(
            "spec_spec_decode_num_accepted_tokens_per_pos",
            "Verify steps that kept a drafted token at a depth.",
            labels=["model_name", "position"],
        )
        for depth, steps in enumerate(counts.per_depth):
            by_depth.add_metric([self._model, str(depth)], steps)
        yield by_depth
        length = GaugeMetricFamily(
            "spec_spec_decode_acceptance_length",
            "Drafted tokens kept per verify step, plus the bonus token, since the start.",
            labels=["model_name"],
        )
        if counts.acceptance_length is not None:
            length.add_metric([self._model], counts.acceptance_length)
        yield length


class _EngineCollector(Collector):
    """Gauges read from the engine when they are asked for."""

    def __init__(self, engine: AsyncEngine, model: str):
        self._engine, self._model = engine, model

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats()
        used = 1 - (stats["pages_free"] + stats["pages_cached"]) / stats["pages_total"]
        for name, text, value in (
            ("spec_num_requests_running", "Requests in the running batch.", stats["running"]),
            ("spec_num_requests_waiting", "Requests in the queue.", stats["waiting"]),
            ("spec_kv_cache_usage_perc", "Share of the cache's pages in use, 0 to 1.", used),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        cached = stats["cached_prompt_tokens"]
        for name, text, value in (
            ("spec_num_preemptions", "Requests that gave up their pages and start again.", stats["preemptions"]),
            ("spec_prefix_cache_queries", "Prompt tokens looked for in the cache.", cached + stats["prefill_tokens"]),
            ("spec_prefix_cache_hits", "Prompt tokens found in the cache.", cached),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
