"""An engine without a model: it says what a script tells it, several tokens a step, and keeps books like a real one."""

import functools
import itertools
import time
from collections.abc import Callable, Iterable

from serve.async_engine import AsyncEngine
from serve.description import SamplingDefaults
from serve.metrics import Metrics
from serve.request import Request, StepRecord, TokenLogprob, Update
from serve.service import Service, Settings
from serve.tree import Tree, Verified
from target_model.errors import UserError
from target_model.resolve import BUNDLED
from target_model.tokenizer import Tokenizer, load_tokenizer

PAGES = 64
DRAFTED = 9


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(BUNDLED / "m3-tiny")


class FakeEngine:
    """`script` gives each request's answer; the first step emits one token, as a prefill does, later ones the next of
    `runs`.

    Of each run all but the last token count as drafted. `running` requests get a step, the others wait. `fail_after`
    steps the engine crashes. A script that ends goes on with its last token for ever.
    """

    def __init__(
        self,
        script: Callable[[Request], list[int]],
        runs: Iterable[int] = (4,),
        eos: tuple[int, ...] = (2,),
        context: int = 4096,
        running: int = 32,
        seconds: float = 0.0,
        fail_after: int | None = None,
    ):
        self.script, self.eos, self.context, self.running = script, eos, context, running
        self.runs = tuple(runs)
        self.seconds, self.fail_after = seconds, fail_after
        self.requests: dict[str, tuple[Request, list[int], itertools.cycle]] = {}
        self.emitted: dict[str, int] = {}
        self.seen: list[Request] = []
        self.aborted: list[str] = []
        self.steps: list[StepRecord] = []

    def add(self, request: Request) -> None:
        if len(request.prompt_ids) >= self.context:
            raise UserError(f"the prompt has {len(request.prompt_ids)} tokens, but the context holds {self.context}")
        self.seen.append(request)
        self.requests[request.id] = (request, self.script(request), itertools.cycle(self.runs))
        self.emitted[request.id] = 0

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return self._drop(request_id)

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Update]:
        if self.fail_after is not None:
            if self.fail_after == 0:
                raise RuntimeError("scripted crash")
            self.fail_after -= 1
        time.sleep(self.seconds)
        return [self._advance(*entry) for entry in list(self.requests.values())[: self.running]]

    def stats(self) -> dict:
        running = min(len(self.requests), self.running)
        return {
            "running": running,
            "waiting": len(self.requests) - running,
            "pages_total": PAGES,
            "pages_free": PAGES - running,
            "pages_cached": 0,
            "preemptions": 0,
            "prefill_tokens": 60,
            "cached_prompt_tokens": 40,
        }

    def _drop(self, request_id: str) -> bool:
        self.emitted.pop(request_id, None)
        return self.requests.pop(request_id, None) is not None

    def _advance(self, request: Request, script: list[int], runs: itertools.cycle) -> Update:
        done, params = self.emitted[request.id], request.params
        size = 1 if done == 0 else next(runs)
        run = [script[min(done + offset, len(script) - 1)] for offset in range(size)]
        run = run[: min(params.max_tokens, self.context - len(request.prompt_ids)) - done]
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos)}
        stop = next((index for index, token in enumerate(run) if token in stops), None)
        tokens = run if stop is None else run[:stop]
        decided = len(tokens) + (stop is not None)
        self.emitted[request.id] = done + decided
        ended = self.emitted[request.id] >= min(params.max_tokens, self.context - len(request.prompt_ids))
        reason = "stop" if stop is not None else "length" if ended else None
        if reason is not None:
            self._drop(request.id)
        step = StepRecord(DRAFTED, min(size - 1, decided), decided) if done else None
        if step is not None:
            self.steps.append(step)
        prompt = [logprob_of(token, params.logprobs or 0) for token in request.prompt_ids[1:]]
        depths = [0] if step is None else [*range(1, size), 0][: len(tokens)]
        return Update(
            request.id,
            tokens,
            depths,
            None if params.logprobs is None else [logprob_of(token, params.logprobs) for token in tokens],
            reason,
            None if stop is None else run[stop],
            step,
            prompt_logprobs=prompt if params.prompt_logprobs and done == 0 else None,
            verified=None if step is None else self._verified(script, done, size),
        )

    def _verified(self, script: list[int], done: int, size: int) -> Verified:
        """A chain of the tokens that were kept, and wrong guesses beside the first of them."""
        coming = [script[min(done + offset, len(script) - 1)] for offset in range(-1, size - 1)]
        wrong = DRAFTED + 1 - len(coming)
        tree = Tree([*coming, *range(60, 60 + wrong)], [*range(-1, size - 1), *[0] * wrong])
        return Verified(tree, list(range(1, size)))


def logprob_of(token: int, top: int) -> TokenLogprob:
    """A value that tells tokens apart."""
    own = -0.5 - token / 10_000
    return TokenLogprob(token, own, tuple((token + rank, own - rank) for rank in range(top)))


def service(engine: FakeEngine, *, settings: Settings | None = None, max_open: int = 1024) -> Service:
    running = AsyncEngine(engine, max_open)
    return Service(
        running,
        tokenizer(),
        "fake",
        engine.context,
        SamplingDefaults(),
        Metrics(running, "fake"),
        settings or Settings(),
    )


def saying(text: str | list[int], *, runs: Iterable[int] = (4,), end: bool = True, **options) -> FakeEngine:
    """An engine that answers every request with `text`, special tokens read as such, and then ends its turn."""
    ids = tokenizer().encode(text, allow_special=True) if isinstance(text, str) else list(text)
    return FakeEngine(lambda request: ids + ([2] if end else []), runs, **options)
