"""The same requests with speculation on and off, alone and crowded, streamed and not: compared field by field.

`plain` asks a server without a draft, one request at a time. `check` asks servers with drafts of every kind and demands
the same answers of them, all but the counts of drafted and of cached tokens.
"""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from serve.description import Description, SamplingDefaults
from serve.engine import Engine
from serve.load import EngineOptions, load_engine
from serve.request import Sequence
from serve.server import make_service
from serve.service import Service
from serve.tree import TreeConfig
from target_model.model import TargetModel
from tests.serve.drafts import ScriptedDrafter, random_draft, use_drafter
from tests.serve.fake_engine import tokenizer
from tests.serve.http_client import chunks, client

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Request = tuple[str, dict[str, Any]]  # path and body


@dataclass(frozen=True)
class Way:
    """How requests are answered. agreement: how often a guess of the draft is right; crowded: all at once."""

    tree: TreeConfig
    agreement: float
    crowded: bool
    stream: bool

    def __str__(self) -> str:
        crowd, form = "crowded" if self.crowded else "alone", "stream" if self.stream else "whole"
        return f"{self.tree}, right {self.agreement:.0%}, {crowd}, {form}"


WAYS = [
    Way(TreeConfig.chain(5), 1.0, crowded=False, stream=False),
    Way(TreeConfig.chain(5), 1.0, crowded=True, stream=True),
    Way(TreeConfig(4, 3, 14), 0.67, crowded=True, stream=False),
    Way(TreeConfig(3, 2, 6), 0.0, crowded=True, stream=True),
]


@dataclass(frozen=True)
class Pair:
    """A target, and what a draft that is always right would say next."""

    target: TargetModel
    script: Callable[[Sequence], list[int]]
    defaults: SamplingDefaults = SamplingDefaults()

    def service(self, way: Way | None, *, draft: dict[str, Any] | None = None, **settings: Any) -> Service:
        """A server of its own; without a `way` it decodes plainly. `draft` changes fields of the draft's config."""
        if way is None:
            return self.around(Engine(self.target, **settings))
        engine = Engine(self.target, random_draft(self.target, **(draft or {})), way.tree, **settings)

        def hit(sequence: Sequence, depth: int) -> bool:
            # By prompt and place: a request meets the same draft alone and in a crowd.
            key = f"{sequence.request.prompt_ids} {sequence.request.choice_index} {len(sequence.token_ids) + depth}"
            return random.Random(key).random() < way.agreement

        use_drafter(engine, ScriptedDrafter(engine.runner.drafter, self.script, hit))
        return self.around(engine)

    def around(self, engine: Engine) -> Service:
        return make_service(engine, tokenizer(), Description("known", None, self.defaults, ()))

    def plain(self, requests: list[Request], **settings: Any) -> list[dict[str, Any]]:
        """What must come out, whole, of each request."""
        return [whole(response)[0] for response in ask_all(self.service(None, **settings), requests, crowded=False)]

    def check(
        self, way: Way, requests: list[Request], expected: list[dict[str, Any]], **settings: Any
    ) -> tuple[Service, list[dict[str, int]]]:
        """Every answer equals the expected one. Returns the server, which has ended, and the drafted tokens' counts."""
        made = self.service(way, **settings)
        read = joined if way.stream else whole
        seen = [read(response) for response in ask_all(made, requests, crowded=way.crowded, stream=way.stream)]
        for (path, body), (answer, _), wanted in zip(requests, seen, expected, strict=True):
            assert answer == close(wanted), f"{way}\n{path} {json.dumps(body)}"
        stats = made.engine.stats()
        assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"] and stats["open_requests"] == 0
        # A wrong guess may be right by chance, where a script has ended.
        assert (made.metrics.totals.accepted > made.metrics.totals.steps / 20) == (way.agreement > 0)
        return made, [counts for _, counts in seen]


class RecordingEngine(Engine):
    """Remembers what it answered to each prompt and choice."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.names, self.answers = {}, {}

    def add(self, request):
        super().add(request)
        self.names[request.id] = key = (tuple(request.prompt_ids), request.choice_index)
        self.answers[key] = []

    def step(self):
        updates = super().step()
        for update in updates:
            self.answers[self.names[update.id]] += update.token_ids
        return updates


def bundled_pair(requests: list[Request], **settings: Any) -> tuple[Pair, list[dict[str, Any]]]:
    """The bundled target with a draft that follows its plain answers to `requests`, and these answers."""
    engine, _, description = load_engine(EngineOptions(draft=None, device="cpu", pages=32))
    plain = RecordingEngine(engine.runner.target, **settings)

    def script(sequence: Sequence) -> list[int]:
        key = (tuple(sequence.request.prompt_ids), sequence.request.choice_index)
        return plain.answers[key][sequence.output_length :]

    pair = Pair(engine.runner.target, script, description.defaults)
    return pair, [whole(response)[0] for response in ask_all(pair.around(plain), requests, crowded=False)]


def ask_all(made: Service, requests: list[Request], *, crowded: bool, stream: bool = False) -> list[httpx.Response]:
    """The answers to all requests, in order, of a service that lives just for them."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}

    async def run() -> list[httpx.Response]:
        async with client(made) as http:
            posts = [http.post(path, json={**body, **options}) for path, body in requests]
            return await asyncio.gather(*posts) if crowded else [await post for post in posts]

    return asyncio.run(run())


def whole(response: httpx.Response) -> tuple[dict[str, Any], dict[str, int]]:
    """An answer without what differs from call to call, and its counts of drafted tokens."""
    body = response.json()
    assert response.status_code == 200, body
    return _split(body["choices"], body["usage"])


def joined(response: httpx.Response) -> tuple[dict[str, Any], dict[str, int]]:
    """The same from a stream."""
    assert response.status_code == 200, response.text
    events = chunks(response)
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        one = found.setdefault(choice["index"], {"index": choice["index"], "logprobs": None, "finish_reason": None})
        assert one["finish_reason"] is None, "something came after the end"
        one["finish_reason"] = choice["finish_reason"]
        if "text" in choice:
            one["text"] = one.get("text", "") + choice["text"]
        else:
            message = one.setdefault("message", {"content": "", "refusal": None})
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    _join_calls(message.setdefault(name, []), value)
                else:
                    message[name] = value if name == "role" else message.get(name, "") + value
        for name, values in (choice["logprobs"] or {}).items():
            one["logprobs"] = one["logprobs"] or {}
            one["logprobs"][name] = (one["logprobs"].get(name) or []) + values if values is not None else None
    return _split([found[index] for index in sorted(found)], events[-1]["usage"])


def _join_calls(calls: list[dict[str, Any]], parts: list[dict[str, Any]]) -> None:
    for part in parts:
        if part["index"] == len(calls):
            calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


def _split(choices: list[dict[str, Any]], usage: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    for message in (choice["message"] for choice in choices if "message" in choice):
        message["content"] = message["content"] or None
        for call in message.get("tool_calls", []):
            assert call.pop("id").startswith("call_")
    # What was cached depends on who came before.
    counts = usage.pop("completion_tokens_details") | usage.pop("prompt_tokens_details")
    for choice in choices:
        # Whether a choice without any token has an empty list or none is the form's, not the answer's.
        if choice["logprobs"] is not None and not any(choice["logprobs"].values()):
            choice["logprobs"] = None
    return {"choices": choices, "usage": usage, "reasoning": counts.pop("reasoning_tokens")}, counts


def close(value: Any) -> Any:
    """Equal but for rounding in log-probabilities."""
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-4)
    if isinstance(value, dict):
        return {key: close(entry) for key, entry in value.items()}
    return [close(entry) for entry in value] if isinstance(value, list) else value
