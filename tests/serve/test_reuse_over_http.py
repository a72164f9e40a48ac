"""What a client and /stats see of reused prompts and of each answer's verify steps."""

import asyncio

import pytest

from serve.load import EngineOptions, load_engine
from serve.server import make_service
from tests.serve.http_client import client

PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\nprint("


def test_usage_and_statistics():
    async def run():
        async with client(make_service(*load_engine(EngineOptions(device="cpu", pages=128)))) as http:
            body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "n": 2}
            answers = [(await http.post("/v1/completions", json=body)).json() for _ in range(2)]
            return answers, (await http.get("/stats")).json()

    (cold, warm), stats = asyncio.run(run())
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (cold, warm)]
    prompt_tokens = cold["usage"]["prompt_tokens"]
    assert cached == [0, (prompt_tokens - 1) // 16 * 16] and cached[1] > 0
    assert [choice["text"] for choice in warm["choices"]] == [choice["text"] for choice in cold["choices"]]
    assert stats["cached_prompt_tokens"] == cached[1]
    # The second answer to a prompt finds it in the cache; the client pays for it once, the engine counts it each time.
    assert stats["engine"]["cached_prompt_tokens"] == 3 * cached[1]
    for answer in (stats, *stats["recent"]):
        histogram, steps = answer["accepted_histogram"], answer["verify_steps"]
        assert sum(histogram) == steps > 0
        assert sum(kept * count for kept, count in enumerate(histogram)) == answer["accepted_tokens"]
        assert [sum(histogram[d + 1 :]) / steps for d in range(len(histogram) - 1)] == pytest.approx(
            answer["accepted_per_position"]
        )
        assert answer["draft_ms"] > 0 and answer["verify_ms"] > 0
    for answer in stats["recent"]:
        assert answer["draft_ms"] + answer["verify_ms"] + answer["other_ms"] == pytest.approx(
            1000 * answer["seconds"], abs=0.2
        )
