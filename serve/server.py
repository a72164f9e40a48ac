"""The HTTP server: an OpenAI-compatible API in front of one engine."""

import asyncio
import gc
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from serve import api_errors
from serve.api_errors import ApiError
from serve.async_engine import AsyncEngine, EngineStopped, Overloaded
from serve.chat import create_chat
from serve.completions import create_completion
from serve.description import Description, usable_context
from serve.engine import Engine
from serve.load import EngineOptions, load_engine
from serve.lockstep import LeaderTarget
from serve.logs import log_to_stderr
from serve.metrics import Metrics
from serve.middleware import Gate
from serve.openapi import complete_openapi
from serve.page import add_page
from serve.service import Service, Settings
from serve.tokens import add_tokens
from target_model.errors import UserError
from target_model.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServeOptions:
    """Everything `spec serve` can be told."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    max_open: int = 1024
    settings: Settings = field(default_factory=Settings)


def run(options: ServeOptions) -> None:
    """Binds the port, loads, and serves until SIGTERM or Ctrl-C; open requests may end. UserError as everywhere."""
    listener = bind(options.host, options.port)
    try:
        engine, tokenizer, description = load_engine(options.engine)
        log_to_stderr()
        service = make_service(
            engine,
            tokenizer,
            description,
            settings=options.settings,
            model_name=options.model_name,
            max_open=options.max_open,
        )
        if isinstance(engine.runner.target, LeaderTarget):
            engine.runner.target.followers.on_loss = service.engine.fail
        server = DrainingServer(service)
        # What is there by now stays: looking for garbage in it would hold up all requests for tenths of a second.
        gc.collect()
        gc.freeze()
        print(greeting(service, description, listener), flush=True)
        # uvicorn ends gracefully on SIGTERM and then raises it again for the handler it found: this one exits with 0.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        server.run(sockets=[listener])
    finally:
        gc.unfreeze()  # or the process ends with complaints about what was never freed
        listener.close()


class DrainingServer(uvicorn.Server):
    """Ends in good order: open requests may go on for the drain timeout, what is left then gets an error as its answer,
    or as the last event of its stream."""

    def __init__(self, service: Service):
        self._service = service
        config = uvicorn.Config(
            create_app(service),
            log_config=None,
            access_log=False,
            # Longer than clients keep a connection, so that the server does not close one in which a request is coming.
            timeout_keep_alive=120,
            # For clients that do not read: everybody else has an end by then.
            timeout_graceful_shutdown=service.settings.drain_timeout + 5,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self._service.engine.drain(self._service.settings.drain_timeout))
        await super().shutdown(sockets)
        await draining


def bind(host: str, port: int) -> socket.socket:
    """The listening socket, taken before anything is loaded so that a port in use costs no time."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With the protocol named, asyncio turns Nagle's algorithm off: without that each event of a stream waits 40 ms.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        return listener
    except (OSError, OverflowError) as error:
        if listener is not None:
            listener.close()
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot listen on {host} port {port}: {reason}") from None


def make_service(
    engine: Engine,
    tokenizer: Tokenizer,
    description: Description,
    *,
    settings: Settings | None = None,
    model_name: str | None = None,
    max_open: int = 1024,
) -> Service:
    """A service around an engine that is not running yet; the application starts and stops it."""
    model = model_name or description.target
    running, config = AsyncEngine(engine, max_open), engine.runner.target.config
    return Service(
        running,
        tokenizer,
        model,
        context=usable_context(engine),
        defaults=description.defaults,
        metrics=Metrics(running, model),
        settings=settings or Settings(),
        pictures=description.pictures,
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        vocab_size=config.vocab_size,
    )


def create_app(service: Service) -> FastAPI:
    """The application. CORS is off: browsers may use it from its own origin only."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        # The open connections have ended or run out of time by now.
        await service.engine.drain(timeout=0)
        service.close()

    app = FastAPI(title="m3-spec", lifespan=lifespan, docs_url=None, redoc_url=None)
    for kind in (ApiError, EngineStopped, Overloaded, ClientDisconnect, HTTPException, Exception):
        app.add_exception_handler(kind, api_errors.handle)
    app.add_middleware(Gate, settings=service.settings)
    _add_completions(app, service)
    add_tokens(app, service)
    _add_state(app, service)
    add_page(app)
    complete_openapi(app)
    return app


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model_card(service)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await create_completion(request, service)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await create_chat(request, service)


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health/live")
    @app.get("/health")
    async def live() -> JSONResponse:
        return _state(service.engine.healthy, service)

    @app.get("/health/ready")
    async def ready() -> JSONResponse:
        return _state(service.engine.ready, service)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.prometheus(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return service.metrics.json()


def _state(good: bool, service: Service) -> JSONResponse:
    if good:
        return JSONResponse({"status": "ok"})
    return ApiError(503, service.engine.failure or "not ready", code="unavailable").response()


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": int(service.metrics.started),
        "owned_by": "m3-spec",
        "max_model_len": service.context,
    }


def greeting(service: Service, description: Description, listener: socket.socket) -> str:
    """What a user sees at the start: what is served, how much memory it takes, where, and a first request to try."""
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if service.settings.api_keys else ""
    body = f'{{"model": "{service.model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return "\n".join(
        [
            *description.lines,
            f"serving {service.model} at {url}/v1, a page to chat at {url}/",
            "",
            f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n  -d '{body}'",
            "",
        ]
    )
