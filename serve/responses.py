"""Bodies of answers and stream events, as OpenAI's clients expect them."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from fastapi.responses import StreamingResponse

from serve.counts import Counts
from serve.request import TokenLogprob
from target_model.tokenizer import Tokenizer


class EventStream(StreamingResponse):
    """Server-sent events; `resources` are closed when the response ends, however it ends."""

    def __init__(self, events: AsyncIterator[str], resources: AsyncExitStack):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._resources = resources

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._resources.aclose()


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False)}\n\n"


DONE = "data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0  # JSON has no infinity


def envelope(kind: str, request_id: str, model: str) -> dict[str, Any]:
    """The fields that every body of one answer begins with."""
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {"id": f"{prefix}-{request_id}", "object": kind, "created": int(time.time()), "model": model}


def usage(prompt_tokens: int, counts: list[Counts]) -> dict[str, Any]:
    """Token counts of a request. A prompt counts once, however many answers it gets.

    Of the tokens that were drafted and verified, `accepted_prediction_tokens` became part of an answer and
    `rejected_prediction_tokens` did not.
    """
    completion = sum(count.completion for count in counts)
    accepted = sum(count.accepted for count in counts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": sum(count.cached for count in counts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(count.reasoning for count in counts),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(count.drafted for count in counts) - accepted,
        },
    }


def chat_logprobs(entries: list[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """One entry for each token of the answer; the token that only ends it has none."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(data)}

    return {
        "content": [
            {**one(entry.token_id, entry.logprob), "top_logprobs": [one(token, value) for token, value in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(entries: list[TokenLogprob], starts: list[int], tokenizer: Tokenizer) -> dict[str, Any]:
    """The older, column-wise form. A token's own value is always among its alternatives."""
    return {
        "tokens": [token_name(entry.token_id, tokenizer) for entry in entries],
        "token_logprobs": [max(entry.logprob, _LEAST_LOGPROB) for entry in entries],
        "top_logprobs": [
            {
                token_name(token, tokenizer): max(value, _LEAST_LOGPROB)
                for token, value in (*entry.top, (entry.token_id, entry.logprob))
            }
            for entry in entries
        ],
        "text_offset": starts,
    }


def token_name(token_id: int, tokenizer: Tokenizer) -> str:
    """The text of a token, or its bytes, as OpenAI writes them, where it is not whole characters: names tell tokens
    apart.
    """
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
