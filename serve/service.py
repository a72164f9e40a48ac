"""What every endpoint needs, and how a request turns into running answers."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from fastapi import Request as HttpRequest

from serve.answer import Answer, Delta
from serve.api_errors import ApiError
from serve.async_engine import AsyncEngine
from serve.load import SamplingDefaults
from serve.metrics import Metrics
from serve.request import Request, SamplingParams
from target_model.tokenizer import Tokenizer

Result = TypeVar("Result")


@dataclass(frozen=True)
class Settings:
    """Limits of a server. Sizes in bytes, times in seconds; no API key means that none is asked for."""

    api_keys: tuple[str, ...] = ()
    max_body: int = 64 * 2**20
    request_timeout: float = 3600.0
    drain_timeout: float = 30.0


@dataclass
class Service:
    """One served model. `context`: tokens of prompt and answer that a request can have."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    model: str
    context: int
    defaults: SamplingDefaults
    metrics: Metrics
    settings: Settings = field(default_factory=Settings)
    # Two threads: a long text never keeps the event loop, and not all others, waiting.
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="tokenizer"))

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise ApiError(404, f"model: {name!r} is not served here, only {self.model!r}", "model", "model_not_found")

    async def off_loop(self, work: Callable[[], Result]) -> Result:
        """Runs work on long texts while the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

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
    ) -> AsyncIterator[list[Answer]]:
        """Starts `choices` answers to each prompt, in that order, and counts them at the end.

        Whatever ends the block, none of them stays in the engine. When the client hangs up, they end with "abort".
        """
        name = http.scope["state"]["request_id"]
        answers: list[Answer] = []
        watcher: asyncio.Task | None = None
        try:
            for index in range(len(prompts) * choices):
                prompt, params = prompts[index // choices]
                unique = f"{name}-{uuid.uuid4().hex[:8]}-{index}"
                request = Request(unique, prompt, params, priority, choice_index=index % choices)
                stream = await self.engine.submit(request)
                answers.append(Answer(stream, self.tokenizer, stop, show_special))
            watcher = asyncio.create_task(_cancel_on_disconnect(http, answers))
            yield answers
        finally:
            if watcher is not None:
                watcher.cancel()
            for answer in answers:
                answer.stream.cancel()
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


async def _cancel_on_disconnect(http: HttpRequest, answers: Iterable[Answer]) -> None:
    """The body has been read, so the only message left is that the client has gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    for answer in answers:
        answer.stream.cancel()
