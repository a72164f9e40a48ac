"""The same requests with speculation off, one by one, and on, all at once, streamed or not: equal field by field.

The target is the bundled one. The draft follows a script of each plain answer that is right two times in three.
"""

import asyncio
import json
import math
import random

import pytest

from serve.engine import Engine
from serve.load import load_engine
from serve.server import make_service
from serve.tree import TreeConfig
from tests.serve.drafts import ScriptedDrafter, random_draft
from tests.serve.http_client import chunks, client

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


SPECIAL = {"]~b]", "[e~[", "<mm:think>", "</mm:think>"}


def user(text):
    return [{"role": "user", "content": text}]


REQUESTS = [
    (
        CHAT,
        {"messages": user("A list?"), "temperature": 0, "max_tokens": 40, "ignore_eos": True, "logprobs": True}
        | {"top_logprobs": 3},
    ),
    (CHAT, {"messages": user("Tell me of trees."), "seed": 5, "max_tokens": 40, "n": 2, "logprobs": True}),
    (CHAT, {"messages": user("Think first."), "thinking_mode": "enabled", "seed": 1, "max_tokens": 30}),
    (CHAT, {"messages": user("Be quick"), "temperature": 0, "max_completion_tokens": 1}),
    (COMPLETIONS, {"prompt": "def add(a, b):", "temperature": 0, "max_tokens": 40, "logprobs": 3}),
    (COMPLETIONS, {"prompt": "import os", "temperature": 0, "max_tokens": 60, "stop": ["\n\n", "self"], "logprobs": 0}),
    (COMPLETIONS, {"prompt": "for i in range(", "seed": 7, "top_p": 0.8, "top_k": 20, "max_tokens": 30, "echo": True}),
    (COMPLETIONS, {"prompt": ["one two", "three four five"], "seed": 8, "n": 2, "max_tokens": 25}),
    (COMPLETIONS, {"prompt": "x = [1, 2", "temperature": 0, "max_tokens": 40, "repetition_penalty": 1.3}),
    (COMPLETIONS, {"prompt": "The same", "temperature": 0, "max_tokens": 40, "frequency_penalty": 0.8}),
    (COMPLETIONS, {"prompt": "A bias", "temperature": 0, "max_tokens": 30, "logit_bias": {"50": -100, "300": 5}}),
    (COMPLETIONS, {"prompt": "The end of", "seed": 3, "max_tokens": 40, "min_tokens": 6, "stop": ["e"], "logprobs": 1}),
    (COMPLETIONS, {"prompt": "wide " * 100, "seed": 4, "min_p": 0.05, "max_tokens": 30}),
    (COMPLETIONS, {"prompt": "class Node:", "seed": 6, "best_of": 3, "n": 2, "max_tokens": 20}),
]


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


@pytest.fixture(scope="module")
def parts():
    engine, tokenizer, description = load_engine(draft=None, device="cpu", pages=256)
    return engine.runner.target, tokenizer, description


def normal(response):
    """A whole answer without what differs from call to call."""
    body = response.json()
    assert response.status_code == 200, body
    details = body["usage"].pop("completion_tokens_details")
    reasoning = details["reasoning_tokens"]
    return {"choices": body["choices"], "usage": body["usage"], "reasoning": reasoning}, details


def joined(response):
    """The same from a stream."""
    events = chunks(response)
    usage = events[-1]["usage"]
    details = usage.pop("completion_tokens_details")
    found = {}
    for choice in (choice for event in events for choice in event["choices"]):
        whole = found.setdefault(choice["index"], {"index": choice["index"], "logprobs": None})
        whole["finish_reason"] = choice["finish_reason"]
        if "text" in choice:
            whole["text"] = whole.get("text", "") + choice["text"]
        else:
            message = whole.setdefault("message", {"content": "", "refusal": None})
            for name, value in choice["delta"].items():
                message[name] = value if name == "role" else message.get(name, "") + value
        for name, values in (choice["logprobs"] or {}).items():
            whole["logprobs"] = whole["logprobs"] or {}
            whole["logprobs"][name] = (whole["logprobs"].get(name) or []) + values if values is not None else None
    choices = [found[index] for index in sorted(found)]
    return {"choices": choices, "usage": usage, "reasoning": details["reasoning_tokens"]}, details


def close(value):
    """Equal but for rounding in log-probabilities."""
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-4)
    if isinstance(value, dict):
        return {key: close(entry) for key, entry in value.items()}
    return [close(entry) for entry in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def plain(parts):
    """Answers without a draft, each alone, and the engine that remembers their tokens."""
    target, tokenizer, description = parts
    engine = RecordingEngine(target, pages=256)

    async def run():
        async with client(make_service(engine, tokenizer, description)) as http:
            return [normal(await http.post(path, json=body)) for path, body in REQUESTS]

    results = asyncio.run(run())
    assert all(details["accepted_prediction_tokens"] == 0 for _, details in results)
    return [body for body, _ in results], engine.answers


@pytest.mark.parametrize("tree", [TreeConfig.chain(4), TreeConfig(4, 3, 14)], ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_speculation_changes_no_field(parts, plain, tree, stream):
    target, tokenizer, description = parts
    expected, answers = plain
    engine = Engine(target, random_draft(target), tree, pages=256)
    chance = random.Random(0)

    def script(sequence):
        key = (tuple(sequence.request.prompt_ids), sequence.request.choice_index)
        return answers[key][sequence.output_length :]

    engine.runner.drafter = ScriptedDrafter(engine.runner.drafter, script, lambda *_: chance.random() < 0.67)
    made = make_service(engine, tokenizer, description)
    cases = [(path, body) for path, body in REQUESTS if not (stream and "best_of" in body)]

    async def run():
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        async with client(made) as http:
            return await asyncio.gather(*[http.post(path, json={**body, **options}) for path, body in cases])

    accepted = 0
    for (path, body), response in zip(cases, asyncio.run(run()), strict=True):
        seen, details = (joined if stream else normal)(response)
        assert seen == close(expected[REQUESTS.index((path, body))]), json.dumps(body)
        accepted += details["accepted_prediction_tokens"]
    totals = made.metrics.json()
    assert totals["accepted_tokens"] == accepted
    assert totals["acceptance_length"] > 2
    pages = totals["engine"]
    assert pages["pages_free"] + pages["pages_cached"] == pages["pages_total"]
    assert totals["engine"]["open_requests"] == 0


def test_log_probabilities_are_distributions(plain):
    """One entry for each token of the text; their strings join to it; alternatives share at most the whole."""
    bodies, _ = plain
    content = bodies[0]["choices"][0]["logprobs"]["content"]
    choice = bodies[0]["choices"][0]
    visible = [entry["token"] for entry in content if entry["token"] not in SPECIAL]
    assert "".join(visible) == choice["message"]["content"]
    assert len(content) == bodies[0]["usage"]["completion_tokens"] == 40
    for entry in content:
        values = [alternative["logprob"] for alternative in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-6
        assert entry["logprob"] == values[0]  # greedy
    assert len({entry["logprob"] for entry in content}) > 5
