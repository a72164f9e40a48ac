"""A small client of OpenAI-compatible servers: streamed chats, read event by event and bounded."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from target_model.errors import UserError

MAX_EVENT = 16 * 2**20  # bytes; a server that never ends a line is not read for ever


class ServerError(UserError):
    """The server refused a request, or broke off: the message is one line and says how."""


def base_url(url: str) -> str:
    """The address without a trailing /v1. UserError when it is none."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--url must begin with http:// or https://, got {url!r}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def connect(url: str, api_key: str | None, timeout: float) -> httpx.AsyncClient:
    """A client whose every wait ends after `timeout` seconds. It opens as many connections as there are requests."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    try:
        return httpx.AsyncClient(base_url=base_url(url), headers=headers, timeout=timeout, limits=limits)
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise UserError(f"--url or --api-key cannot be used: {error}") from None


async def find_model(http: httpx.AsyncClient, name: str | None) -> str:
    """`name`, or the first model that the server lists."""
    try:
        response = await http.get("/v1/models")
    except httpx.HTTPError as error:
        raise UserError(f"{http.base_url} does not answer: {describe(error)}") from None
    if response.status_code != 200:
        raise UserError(f"{http.base_url} lists no models: {refusal(response.status_code, response.content)}")
    try:
        listed = [entry["id"] for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{http.base_url} lists no models: its answer is not OpenAI's") from None
    if name is None and not listed:
        raise UserError(f"{http.base_url} lists no models: name one with --model")
    return listed[0] if name is None else name


async def stream_chat(http: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The chunks of one streamed chat. ServerError when it is refused, fails, or ends before [DONE]."""
    try:
        async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            if response.status_code != 200:
                raise ServerError(refusal(response.status_code, await response.aread()))
            async for data in _events(response):
                if data == b"[DONE]":
                    return
                yield _chunk(data)
    except httpx.HTTPError as error:
        raise ServerError(describe(error)) from None
    raise ServerError("the stream ended without [DONE]")


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each event; these servers write it on one line."""
    waiting = b""
    async for piece in response.aiter_bytes():
        waiting += piece
        *lines, waiting = waiting.split(b"\n")
        if len(waiting) > MAX_EVENT:
            raise ServerError(f"an event is longer than {MAX_EVENT} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _chunk(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise ServerError("an event of the stream is not a JSON object")
    if chunk.get("error"):
        raise ServerError(_message(chunk["error"]))
    return chunk


def refusal(status: int, body: bytes) -> str:
    """What a refusing answer says, on one line."""
    try:
        return f"{status}: {_message(json.loads(body)['error'])}"
    except (ValueError, KeyError, TypeError):
        return f"status {status}"


def describe(error: httpx.HTTPError) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _message(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(message).split())[:500]
