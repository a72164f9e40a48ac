"""One answer while it is produced: the engine's updates become text, cut where the answer ends, and counts."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from serve.async_engine import Stream
from serve.counts import Counts
from serve.detokenize import Detokenizer, Released
from serve.request import TokenLogprob, Update
from serve.tree import Verified
from target_model.tokenizer import Tokenizer


@dataclass
class Delta:
    """What one update adds to an answer. Tokens come with the delta that releases their text; depths as in `Update`.

    starts[i] is where the text of token i begins in the visible text of the answer, in characters. `verified` is the
    update's tree, of its path only what became part of the answer; a whole answer has none.
    """

    segments: list[str | int]
    token_ids: list[int]
    starts: list[int]
    depths: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str | None = None
    verified: Verified | None = None

    @staticmethod
    def empty() -> "Delta":
        return Delta([], [], [], [], [])

    def extend(self, later: "Delta") -> None:
        self.segments += later.segments
        self.token_ids += later.token_ids
        self.starts += later.starts
        self.depths += later.depths
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason


class Answer:
    """Reads one stream to its end. Iterate over `deltas` once; the other attributes are final after that."""

    def __init__(
        self,
        stream: Stream,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        show_special: bool = False,
        arrived: float | None = None,
    ):
        self.stream = stream
        params = stream.request.params
        self._detokenizer = Detokenizer(tokenizer, stop, params.min_tokens, show_special)
        self._tokens: list[tuple[int, int]] = []  # id and depth, not yet released
        self._logprobs: list[TokenLogprob] = []
        self.counts = Counts()
        self.finish_reason: str | None = None
        self.ended_by_token = False  # by the end of text or a stop token: the model itself was done
        self.arrived = stream.submitted if arrived is None else arrived  # when the client asked
        self.arrivals: list[tuple[float, int]] = []  # time and tokens of each update
        self.queue_seconds: float | None = None  # None until it has run
        self.prompt_logprobs: list[TokenLogprob] = []

    async def deltas(self) -> AsyncIterator[Delta]:
        """One delta an update. A stop string drops the request from the engine at once."""
        try:
            async for update in self.stream:
                yield self._take(update)
                if self.finish_reason is not None:
                    return
        finally:
            self.stream.cancel()

    def _take(self, update: Update) -> Delta:
        if self.stream.request.choice_index == 0:
            self.counts.cached = update.cached_tokens
        if update.queue_seconds is not None:
            self.queue_seconds = update.queue_seconds
        self.prompt_logprobs += update.prompt_logprobs or []
        before = self._detokenizer.tokens_in
        released = self._detokenizer.push(update.token_ids)
        taken = self._detokenizer.tokens_in - before
        self._tokens += zip(update.token_ids[:taken], update.accepted_from_draft[:taken], strict=True)
        self._logprobs += (update.logprobs or [])[:taken]
        if released.stopped is not None:
            self.finish_reason = "stop"
        elif update.finish_reason is not None:
            rest = self._detokenizer.finish()
            released = Released(released.segments + rest.segments, released.starts + rest.starts)
            self.finish_reason = "stop" if rest.stopped is not None else update.finish_reason
            self.ended_by_token = update.stop_token is not None and rest.stopped is None
        decided = taken + self.ended_by_token
        self.counts.completion += decided
        if decided:
            self.arrivals.append((time.perf_counter(), decided))
        verified = None
        if update.step is not None:
            accepted = min(update.step.accepted, decided)
            self.counts.add_step(update.step, accepted)
            if update.verified is not None:
                verified = Verified(update.verified.tree, update.verified.path[:accepted])
        return self._delta(released, verified)

    def _delta(self, released: Released, verified: Verified | None) -> Delta:
        count = len(released.starts)
        tokens, self._tokens = self._tokens[:count], self._tokens[count:]
        logprobs, self._logprobs = self._logprobs[:count], self._logprobs[count:]
        ids, depths = [token for token, _ in tokens], [depth for _, depth in tokens]
        return Delta(released.segments, ids, released.starts, depths, logprobs, self.finish_reason, verified)
