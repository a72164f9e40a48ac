"""Clients for tests: in-process over ASGI, and a real server on loopback in its own thread."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

from serve.server import DrainingServer, bind, create_app
from serve.service import Service


@contextlib.asynccontextmanager
async def client(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """An in-process client of a running application."""
    app = create_app(service)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as http:
            yield http


def ask(service: Service, path: str, **body: Any) -> httpx.Response:
    """One POST to a service that lives just for it."""

    async def run() -> httpx.Response:
        async with client(service) as http:
            return await http.post(path, json=body)

    return asyncio.run(run())


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end with [DONE]."""
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]", events[-1]
    return [json.loads(event) for event in events[:-1]]


@contextlib.contextmanager
def serving(service: Service) -> Iterator[str]:
    """A real server on a free port; yields its URL."""
    listener = bind("127.0.0.1", 0)
    server = DrainingServer(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()
