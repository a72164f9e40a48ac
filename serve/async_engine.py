"""The engine in its own thread, with an asyncio stream for each request.

Only that thread touches the engine; everything else sends it commands. A crash of the loop ends every stream with an
error.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from serve.engine import Engine
from serve.request import Request, Update
from target_model.errors import UserError

logger = logging.getLogger("serve.engine")


class EngineStopped(Exception):
    """The engine takes no requests, or lost this one: it is shutting down or has crashed. The message says which."""


class Overloaded(Exception):
    """More requests are open than the server accepts."""


class Stream:
    """Updates of one request, in order. Whoever stops reading early has to `cancel`."""

    def __init__(self, request: Request, cancel: Callable[["Stream"], None]):
        self.request = request
        self.submitted = time.perf_counter()
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Update | Exception] = asyncio.Queue()
        self._cancel = cancel
        self._finished = False

    def post(self, item: Update | Exception | None) -> None:
        """From the engine's thread: None once the request is queued, then updates, or the error that ends it."""
        try:
            self._loop.call_soon_threadsafe(self._receive, item)
        except RuntimeError:  # the loop has closed, nobody is left to read
            logger.debug("request %s has no reader", self.request.id)

    def _receive(self, item: Update | Exception | None) -> None:
        if self.accepted.done():
            self._queue.put_nowait(item)
        elif isinstance(item, Exception):
            self.accepted.set_exception(item)
        else:
            self.accepted.set_result(None)

    def __aiter__(self) -> AsyncIterator[Update]:
        return self

    async def __anext__(self) -> Update:
        if self._finished:
            raise StopAsyncIteration
        item = await self._queue.get()
        self._finished = isinstance(item, Exception) or item.finish_reason is not None
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        """Drops the request, unless it has ended; a reader still waiting gets a last update that says "abort"."""
        if not self._finished:
            self._cancel(self)
            self._queue.put_nowait(Update(self.request.id, [], [], finish_reason="abort"))


class AsyncEngine:
    """Runs `engine.step` while there is work. `max_open` bounds the requests in the engine, queued ones included."""

    def __init__(self, engine: Engine, max_open: int = 1024):
        self.engine = engine
        self.max_open = max_open
        self.failure: str | None = None
        self._draining = False
        self._commands: queue.SimpleQueue[Stream | str | None] = queue.SimpleQueue()  # add, abort by id, stop
        self._streams: dict[str, Stream] = {}
        # Of `failure` and `_streams`. Reentrant: the garbage collector may drop a request, and so abort it, anywhere.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def healthy(self) -> bool:
        return self.failure is None and self._thread.is_alive()

    @property
    def ready(self) -> bool:
        return self.healthy and not self._draining

    async def submit(self, request: Request) -> Stream:
        """Queues a request. UserError when the engine refuses it, Overloaded or EngineStopped when it takes none."""
        with self._lock:
            if self.failure is not None:
                raise EngineStopped(self.failure)
            if self._draining:
                raise EngineStopped("the server is shutting down")
            if len(self._streams) >= self.max_open:
                raise Overloaded(f"{len(self._streams)} requests are open, as many as this server takes")
            if request.id in self._streams:
                raise UserError(f"request id {request.id!r} is in use")
            stream = Stream(request, self._abort)
            self._streams[request.id] = stream
        self._commands.put(stream)
        try:
            await stream.accepted
        except BaseException:
            self._abort(stream)
            raise
        return stream

    async def drain(self, timeout: float) -> None:
        """Refuses new requests, waits up to `timeout` seconds for the open ones, drops the rest and ends the thread."""
        self._draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while self._streams and self.healthy and loop.time() < deadline:
            await asyncio.sleep(0.02)
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        self.fail("the server is shutting down")

    def stats(self) -> dict[str, Any]:
        """The engine's own numbers, and how many requests are open here."""
        return {**self.engine.stats(), "open_requests": len(self._streams)}

    def _abort(self, stream: Stream) -> None:
        with self._lock:
            if self._streams.pop(stream.request.id, None) is None:
                return  # it has ended: the engine need not hear of it
        self._commands.put(stream.request.id)

    def _run(self) -> None:
        try:
            while self._obey():
                if self.engine.has_work():
                    self._deliver(self.engine.step())
        except Exception as error:
            logger.exception("the engine has crashed")
            self.fail(f"the engine has crashed: {type(error).__name__}: {error}")

    def _obey(self) -> bool:
        """Carries out the commands that wait, or waits for one when there is nothing else to do. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_work())
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, str):
                self.engine.abort(command)
            else:
                self._add(command)

    def _add(self, stream: Stream) -> None:
        if stream.request.id not in self._streams:
            return  # dropped before its turn came; the abort that follows finds nothing
        try:
            self.engine.add(stream.request)
        except UserError as error:
            with self._lock:
                self._streams.pop(stream.request.id, None)
            stream.post(error)
        else:
            stream.post(None)

    def _deliver(self, updates: list[Update]) -> None:
        for update in updates:
            with self._lock:
                ended = update.finish_reason is not None
                stream = (self._streams.pop if ended else self._streams.get)(update.id, None)
            if stream is not None:
                stream.post(update)

    def fail(self, reason: str) -> None:
        """Marks the engine as gone and ends what is open, from any thread."""
        with self._lock:
            self.failure = reason
            streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.post(EngineStopped(reason))
