"""What a client asks for, and what the engine keeps while it answers."""

import math
import secrets
import time
from dataclasses import dataclass, field

from torch import Tensor

from serve.grammar import Constraint, Grammar
from serve.noise import NoiseStream
from serve.tree import Verified
from target_model.errors import UserError
from target_model.images import VisionInput


@dataclass(frozen=True)
class SamplingParams:
    """How the target's distribution becomes a token. Filters act in this order: bias, penalties, temperature, top-k,
    top-p, min-p.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. repetition_penalty counts prompt and answer, presence
    and frequency penalties the answer. Before `min_tokens` tokens no end-of-text and no stop token can be chosen.
    `logprobs` is the number of alternatives reported with each token (0: only the token's own), None reports nothing;
    they are the model's own, before any filter. With `prompt_logprobs` the same is reported of the prompt.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int = 256
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False

    def __post_init__(self):
        def check(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise UserError(f"{name} must be {rule}, got {getattr(self, name)!r}")

        check(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "a finite number >= 0")
        check(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        check(self.top_k >= 0, "top_k", ">= 0 (0 is off)")
        check(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        check(math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0, "repetition_penalty", "> 0")
        check(math.isfinite(self.presence_penalty), "presence_penalty", "finite")
        check(math.isfinite(self.frequency_penalty), "frequency_penalty", "finite")
        check(all(math.isfinite(v) for v in self.logit_bias.values()), "logit_bias", "a map to finite numbers")
        check(self.max_tokens >= 1, "max_tokens", ">= 1")
        check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "between 0 and max_tokens")
        check(self.logprobs is None or self.logprobs >= 0, "logprobs", ">= 0")
        check(self.logprobs is not None or not self.prompt_logprobs, "prompt_logprobs", "with a number of logprobs")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def uses_history(self) -> bool:
        """Whether the distribution depends on the tokens before the row, beyond what the model sees."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class ImageSpan:
    """Prompt positions start..end-1 show the image (or video) whose content hashes to `digest`, not their token ids.

    They show the rows of `image` from `first_row` on: a video stands in several places, one for each temporal patch.
    """

    start: int
    end: int
    digest: bytes
    image: VisionInput | None = None
    first_row: int = 0


@dataclass(frozen=True)
class Request:
    """One answer to produce. `choice_index` tells the n answers of one call apart: it enters the noise. `grammar` is
    what the answer has to follow, None for free text.

    Lower priority values go first, see scheduler.py.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    choice_index: int = 0
    images: tuple[ImageSpan, ...] = ()
    grammar: Grammar | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one emitted token and of the most likely ones, (id, value), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class StepRecord:
    """One verify step of one sequence: nodes drafted (root excluded), drafted tokens kept, tokens emitted, and its
    share of the seconds that the batch took.
    """

    drafted: int
    accepted: int
    emitted: int
    draft_seconds: float = field(default=0.0, compare=False)
    verify_seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Update:
    """What one engine step brought for one request.

    accepted_from_draft gives for each emitted token its depth in the tree, 0 for the target's own (bonus or prefill)
    token. finish_reason is None while the request goes on, else "stop", "length" or "abort"; stop_token is the id that
    ended it, which is not among token_ids. `step`, and `verified`, what it was about, are None for the token that comes
    from prefill. cached_tokens is how many prompt tokens were found in the cache instead of computed, queue_seconds how
    long the request waited before it first ran. prompt_logprobs, of all prompt tokens but the first, come with the
    first update.
    """

    id: str
    token_ids: list[int]
    accepted_from_draft: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_token: int | None = None
    step: StepRecord | None = None
    cached_tokens: int = 0
    queue_seconds: float | None = field(default=None, compare=False)
    verified: Verified | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True)
class Completion:
    """A finished answer, as `Engine.generate` returns it."""

    token_ids: list[int]
    accepted_from_draft: list[int]
    finish_reason: str
    stop_token: int | None
    logprobs: list[TokenLogprob] | None
    steps: list[StepRecord]
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob] | None = None

    @staticmethod
    def of(updates: list[Update]) -> "Completion":
        """Joins all updates of one request."""
        wants_logprobs = updates[0].logprobs is not None
        return Completion(
            token_ids=[token for update in updates for token in update.token_ids],
            accepted_from_draft=[depth for update in updates for depth in update.accepted_from_draft],
            finish_reason=updates[-1].finish_reason or "abort",
            stop_token=updates[-1].stop_token,
            logprobs=[entry for update in updates for entry in update.logprobs or []] if wants_logprobs else None,
            steps=[update.step for update in updates if update.step is not None],
            cached_tokens=updates[-1].cached_tokens,
            prompt_logprobs=updates[0].prompt_logprobs,
        )


class Sequence:
    """The engine's state of one request.

    token_ids are the prompt and every decided token. The first `computed` of them have their keys in the target's
    cache; while decoding that is all but the last, the root of the next tree. `pages` is the block table; those of the
    first `published` tokens are offered to other sequences under `page_keys`.

    The draft follows behind: slots below `draft_end` hold its rows (slot 0 has none), and `taps` are the target's taps
    [n, A] of the positions from draft_end - 1 to computed - 1, whose rows it still has to compute; `choices` [n, J, N]
    are the blocks chosen there, where the draft goes by them. `root_state` [H] is its state of the last row it
    computed, from which the next tree grows, and `root_blocks` [K, N + 1] that row's blocks.
    """

    def __init__(self, request: Request):
        self.request = request
        self.params = request.params
        self.token_ids = list(request.prompt_ids)
        self.prompt_length = len(request.prompt_ids)
        self.constraint = None if request.grammar is None else Constraint(request.grammar)
        self.seed = secrets.randbits(64) if request.params.seed is None else request.params.seed
        self.noise = NoiseStream(self.seed, request.choice_index)
        self.prompt_logprobs: list[TokenLogprob] = []
        self.page_keys: list[bytes] = []
        self.queued = time.perf_counter()
        self.queue_seconds: float | None = None  # None until it is first admitted
        self.cached_tokens: int | None = None  # as well
        self.restart([], 0)

    def restart(self, pages: list[int], computed: int) -> None:
        """Begins anew, also after a preemption, with pages that hold the first `computed` tokens."""
        self.pages = pages
        self.computed = self.published = computed
        self.draft_end = max(computed, 1)
        self.taps: list[Tensor] = []
        self.choices: list[Tensor] = []
        self.root_state: Tensor | None = None
        self.root_blocks: Tensor | None = None

    @property
    def output_length(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def prefill_end(self) -> int:
        """Slots that prefill has to fill: the whole prompt, or after a preemption all but the last decided token."""
        return len(self.token_ids) - 1 if self.output_length else self.prompt_length

    @property
    def decoding(self) -> bool:
        return self.output_length > 0 and self.computed == len(self.token_ids) - 1
