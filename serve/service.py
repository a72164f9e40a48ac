"""What every endpoint needs, and how a request turns into running answers."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from fastapi import Request as HttpRequest
from starlette.requests import ClientDisconnect

from serve.answer import Answer, Delta
from serve.api_errors import ApiError
from serve.async_engine import AsyncEngine, Stream
from serve.description import SamplingDefaults
from serve.grammar import Grammar, GrammarCompiler
from serve.metrics import Metrics
from serve.pictures import PictureLimits
from serve.request import ImageSpan, Request, SamplingParams
from target_model.images import VisionProcessor
from target_model.tokenizer import Tokenizer

Result = TypeVar("Result")

_LONG = 2**18  # bytes: about a tenth of a second to encode


@dataclass(frozen=True)
class Settings:
    """Limits of a server. Sizes in bytes, times in seconds; no API key means that none is asked for.

    body_timeout: for a body to arrive. request_timeout: for an answer, once it has begun; `grace` later the connection
    is closed, whether its client has read the answer or not.
    """

    api_keys: tuple[str, ...] = ()
    max_body: int = 64 * 2**20
    body_timeout: float = 120.0
    request_timeout: float = 3600.0
    grace: float = 150.0
    drain_timeout: int = 30
    pictures: PictureLimits = field(default_factory=PictureLimits)


@dataclass
class Service:
    """One served model.

    context: tokens of prompt and answer that a request can have. pictures: reads them, None when the model sees none;
    image_token_id and video_token_id stand for them in a prompt. vocab_size: of the model, None: the tokenizer's.
    """

    engine: AsyncEngine
    tokenizer: Tokenizer
    model: str
    context: int
    defaults: SamplingDefaults
    metrics: Metrics
    settings: Settings = field(default_factory=Settings)
    pictures: VisionProcessor | None = None
    image_token_id: int | None = None
    video_token_id: int | None = None
    vocab_size: int | None = None
    grammars: GrammarCompiler = field(init=False)
    # Long texts have a thread of their own, so that they keep only each other waiting.
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="texts"))
    long_pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="long-texts")
    )

    def __post_init__(self):
        self.grammars = GrammarCompiler(self.tokenizer, self.vocab_size or self.tokenizer.vocab_size)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise ApiError(404, f"model: {name!r} is not served here, only {self.model!r}", "model", "model_not_found")

    async def off_loop(self, work: Callable[[], Result], size: int) -> Result:
        """Runs work on `size` bytes of text while the event loop goes on."""
        pool = self.long_pool if size > _LONG else self.pool
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        for pool in (self.pool, self.long_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def answers(
        self,
        http: HttpRequest,
        prompts: list[tuple[list[int], SamplingParams]],
        choices: int,
        *,
        stop: tuple[str, ...],
        priority: int,
        show_special: bool = False,
        images: tuple[ImageSpan, ...] = (),
        grammar: Grammar | None = None,
    ) -> AsyncIterator[list[Answer]]:
        """Starts `choices` answers to each prompt, in that order, and counts them at the end.

        All prompts show `images`, all answers follow `grammar`. Whatever ends the block, none of them stays in the
        engine. When the client hangs up, they end with "abort".
        """
        if await http.is_disconnected():  # while its prompt was being encoded
            raise ClientDisconnect
        # A client may send the same id twice, the engine must not see it twice.
        name = f"{http.scope['state']['request_id']}-{uuid.uuid4().hex[:8]}"
        requests = [
            Request(f"{name}-{place}-{choice}", prompt, params, priority, choice, images, grammar)
            for place, (prompt, params) in enumerate(prompts)
            for choice in range(choices)
        ]
        # All at once: the engine takes requests between two steps, one after the other would cost a step each.
        submissions = [asyncio.create_task(self.engine.submit(request)) for request in requests]
        answers: list[Answer] = []
        watcher: asyncio.Task | None = None
        try:
            await asyncio.wait(submissions)
            arrived = http.scope["state"]["arrived"]
            answers = [Answer(task.result(), self.tokenizer, stop, show_special, arrived) for task in submissions]
            for answer in answers:
                self.metrics.begin(answer)
            watcher = asyncio.create_task(_cancel_on_disconnect(http, answers))
            yield answers
        finally:
            if watcher is not None:
                watcher.cancel()
            for submission in submissions:
                _drop(submission)
            for answer in answers:
                self.metrics.observe(answer)
            http.scope["state"]["log"].update(
                prompt_tokens=sum(len(prompt) for prompt, _ in prompts),
                completion_tokens=sum(answer.counts.completion for answer in answers),
                accepted_tokens=sum(answer.counts.accepted for answer in answers),
                finish_reasons=[answer.finish_reason or "abort" for answer in answers],
            )

    async def merged(self, answers: list[Answer]) -> AsyncIterator[tuple[int, Delta]]:
        """The deltas of all answers as they come, with the answer's index. ApiError 504 when the time is up."""
        arrivals: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()

        async def pump(index: int, answer: Answer) -> None:
            try:
                async for delta in answer.deltas():
                    arrivals.put_nowait((index, delta))
                arrivals.put_nowait(None)
            except Exception as error:
                arrivals.put_nowait(error)

        limit = self.settings.request_timeout
        late = ApiError(504, f"the request took longer than {limit:g} s", code="timeout")
        timer = asyncio.get_running_loop().call_later(limit, arrivals.put_nowait, late)
        pumps = [asyncio.create_task(pump(index, answer)) for index, answer in enumerate(answers)]
        running = len(pumps)
        try:
            while running:
                item = await arrivals.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            timer.cancel()
            for task in pumps:
                task.cancel()


def _drop(submission: asyncio.Task[Stream]) -> None:
    """Takes a request out of the engine, however far it got."""
    if not submission.done():
        submission.cancel()
    elif not submission.cancelled() and submission.exception() is None:
        submission.result().cancel()


async def _cancel_on_disconnect(http: HttpRequest, answers: Iterable[Answer]) -> None:
    """The body has been read, so the only message left is that the client has gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    for answer in answers:
        answer.stream.cancel()
