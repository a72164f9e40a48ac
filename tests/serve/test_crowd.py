"""Two hundred clients at once on loopback, half of which hang up at a random moment: no leak, and the same text."""

import asyncio
import json
import random

import httpx
import pytest

from serve.engine import Engine
from serve.load import load_engine
from serve.server import make_service
from serve.tree import TreeConfig
from tests.serve.drafts import ScriptedDrafter, random_draft
from tests.serve.http_client import serving

PROMPTS = [
    "def add(a, b):",
    "import os",
    "class Node:",
    "for i in range(",
    "The answer is",
    "x = [1, 2",
    "Once",
    "# To do",
]
CLIENTS, ROUNDS = 200, 2


@pytest.mark.slow
def test_a_crowd_with_random_aborts():
    plain, tokenizer, description = load_engine(draft=None, device="cpu", pages=256)
    target = plain.runner.target
    with serving(make_service(plain, tokenizer, description)) as url, httpx.Client(base_url=url, timeout=60) as http:
        bodies = [{"prompt": prompt, "seed": seed, "max_tokens": 24} for seed, prompt in enumerate(PROMPTS)]
        expected = [http.post("/v1/completions", json=body).json()["choices"][0] for body in bodies]

    # Pages for about a third of the crowd's running requests: some are preempted.
    engine = Engine(target, random_draft(target), TreeConfig(3, 2, 7), pages=40, max_running=32)
    scripts = {
        tuple(tokenizer.encode(b["prompt"])): tokenizer.encode(e["text"]) for b, e in zip(bodies, expected, strict=True)
    }
    chance = random.Random(1)
    engine.runner.drafter = ScriptedDrafter(
        engine.runner.drafter,
        lambda sequence: scripts[tuple(sequence.request.prompt_ids)][sequence.output_length :],
        lambda *_: chance.random() < 0.7,
    )
    made = make_service(engine, tokenizer, description)
    finished = asyncio.run(_crowd(made, bodies, expected))
    stats = made.engine.stats()
    assert finished > CLIENTS * ROUNDS // 3
    assert (stats["running"], stats["waiting"], stats["open_requests"]) == (0, 0, 0)
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    assert stats["preemptions"] > 0
    assert made.metrics.json()["acceptance_length"] > 1.2
    assert sum(made.metrics.requests.values()) == CLIENTS * ROUNDS


async def _crowd(made, bodies, expected) -> int:
    chance = random.Random(0)

    async def one(http: httpx.AsyncClient, index: int) -> bool:
        body, whole = bodies[index % len(bodies)], expected[index % len(bodies)]
        give_up = chance.randrange(12) if chance.random() < 0.5 else None
        text, seen = "", 0
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if not line or line == "data: [DONE]":
                    continue
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                text += choice["text"]
                seen += 1
                assert whole["text"].startswith(text)
                if seen == give_up:
                    return False
        assert (text, choice["finish_reason"]) == (whole["text"], whole["finish_reason"])
        return True

    with serving(made) as url:
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
            results = []
            for _ in range(ROUNDS):
                results += await asyncio.gather(*[one(http, index) for index in range(CLIENTS)])
        while made.engine.stats()["open_requests"] or made.engine.stats()["running"]:
            await asyncio.sleep(0.05)
    return sum(results)
