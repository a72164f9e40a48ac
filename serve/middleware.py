"""Around every request: an id, a log line, the API key and the size of the body."""

import asyncio
import hmac
import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.api_errors import ApiError
from serve.service import Settings

logger = logging.getLogger("serve.access")

# Asked for by load balancers and scrapers, which carry no key, and the page, which asks its reader for one.
OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready", "/metrics"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class Gate:
    """Refuses requests without a valid key or with too large a body, names every request and logs how it went.

    A request id comes from the header X-Request-Id, if it is a plain word of at most 128 characters, else it is
    drawn; the answer carries it. Endpoints add fields of the log line in `scope["state"]["log"]`.
    """

    def __init__(self, app: ASGIApp, settings: Settings):
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        log: dict[str, Any] = {}
        started, status = time.perf_counter(), 0
        scope.setdefault("state", {}).update(request_id=request_id, log=log, arrived=started)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            async with asyncio.timeout(self.settings.request_timeout + self.settings.grace):
                await self._guarded(scope, headers, receive, send_with_id)
        except TimeoutError:
            # A request ends in its time by itself, unless its client does not read.
            if not status:
                limit = self.settings.request_timeout
                late = ApiError(504, f"the request took longer than {limit:g} s", code="timeout")
                await late.response()(scope, receive, send_with_id)
        finally:
            line = {
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(time.perf_counter() - started, 4),
                **log,
            }
            level = logging.DEBUG if scope["path"] in OPEN_PATHS else logging.INFO
            logger.log(level, "request", extra={"fields": line})

    async def _guarded(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        error = self._refusal(scope["path"], headers)
        if error is not None:
            await error.response()(scope, receive, send)
            return
        await self.app(scope, self._bounded(receive), send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        keys = self.settings.api_keys
        if keys and path not in OPEN_PATHS:
            given = headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")  # the bytes as sent
            # All keys are compared, each in constant time: the time says nothing about how much of a key was right.
            matches = [hmac.compare_digest(given, key.encode("utf-8")) for key in keys]
            if not any(matches):
                return ApiError(
                    401, "missing or wrong API key: send it as Authorization: Bearer", code="invalid_api_key"
                )
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self.settings.max_body:
            return self._too_large()
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """Counts a body that comes without a length, and waits for none for ever."""
        size, more, deadline = 0, True, time.monotonic() + self.settings.body_timeout

        async def bounded() -> Message:
            nonlocal size, more
            if not more:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), deadline - time.monotonic())
            except TimeoutError:
                limit = self.settings.body_timeout
                raise ApiError(408, f"the body did not arrive within {limit:g} s", "body", "timeout") from None
            more = message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self.settings.max_body:
                raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than the {self.settings.max_body} bytes this server takes", "body")
