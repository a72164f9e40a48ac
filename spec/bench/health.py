"""How fast /health answers while the server tokenises one very long prompt."""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from spec.bench.percentiles import spread
from spec.streaming import describe, refusal
from target_model.errors import UserError

PAUSE = 0.02  # seconds between two questions
TEXT = "The quick brown fox jumps over the lazy dog, 0123456789 times. "


@dataclass(frozen=True)
class Health:
    """megabytes (2**20 bytes) were tokenised in `seconds`; `answers` are the seconds /health took meanwhile."""

    megabytes: int
    seconds: float
    answers: list[float]

    def summary(self) -> dict[str, Any]:
        return {
            "megabytes": self.megabytes,
            "tokenise_seconds": round(self.seconds, 3),
            "answers": len(self.answers),
            "answer_ms": spread(self.answers),
        }


async def watch_health(http: httpx.AsyncClient, model: str, megabytes: int) -> Health:
    """Posts the prompt to /tokenize and asks /health until that has answered. UserError when either refuses."""
    size = megabytes * 2**20
    prompt = (TEXT * (size // len(TEXT) + 1))[:size]
    # Encoded before the clock starts: this process, too, answers nothing while it is busy with a long text.
    content = json.dumps({"model": model, "prompt": prompt}).encode()
    started = time.perf_counter()
    headers = {"Content-Type": "application/json"}
    tokenising = asyncio.create_task(http.post("/tokenize", content=content, headers=headers))
    answers = []
    try:
        while not tokenising.done():
            asked = time.perf_counter()
            response = await http.get("/health")
            answers.append(time.perf_counter() - asked)
            if response.status_code != 200:
                raise UserError(f"/health: {refusal(response.status_code, response.content)}")
            await asyncio.sleep(PAUSE)
        response = await tokenising
    except httpx.HTTPError as error:
        raise UserError(f"/tokenize or /health does not answer: {describe(error)}") from None
    finally:
        tokenising.cancel()
    if response.status_code != 200:
        raise UserError(f"/tokenize: {refusal(response.status_code, response.content)}")
    return Health(megabytes, time.perf_counter() - started, answers)
