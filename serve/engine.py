"""The engine: requests in, one step at a time, decided tokens out. The same for one request and for many, with a draft
and without.
"""

import time
from dataclasses import dataclass, field

import torch

from draft_model.chosen_blocks import ChosenBlocks
from draft_model.model import Eagle3Draft
from serve.budget import OFF, Budget, CostTable
from serve.counts import Counts
from serve.drafter import Drafter
from serve.image_rows import check_images
from serve.pages import PageAllocator
from serve.request import Completion, Request, SamplingParams, Sequence, StepRecord, Update
from serve.runner import Clock, Outcome, Runner
from serve.scheduler import Limits, Scheduler
from serve.synthetic import SyntheticAcceptance
from serve.tree import TreeConfig, Verified, step_slots
from target_model.errors import UserError
from target_model.model import TargetModel


@dataclass
class EngineStats:
    """Totals since the start. `decoded.completion` counts what verify steps emitted, not the tokens of prefill."""

    steps: int = 0
    prefill_tokens: int = 0
    decoded: Counts = field(default_factory=Counts)
    seconds: float = 0.0


class Engine:
    """Serves a target with a draft (or plainly, with `draft` None). Not thread-safe: one thread adds, steps and aborts.

    pages: pages of the cache; by default 32 whole contexts, at most 65,536 tokens. context: tokens of prompt and
    answer, by default the target's limit. `prefill_tokens`, `max_running` and `max_waiting` bound a step and the queue.
    costs: a measured table; the trees then follow from it and from what is accepted, and `tree` does not count.
    sampling: "coupled" (target and draft share the noise of each position: a seed gives one text whatever is drafted)
    or "rejection" (the distribution is the same, the text of a seed depends on the draft). synthetic_acceptance: a mean
    acceptance length to force, for benchmarks of the system; the text is then meaningless.
    kv_dtype, index_dtype: what the target's K and V, and its index K, are rounded to in the cache; by default the type
    of the weights. draft_attention: "full", or to the blocks that a layer of the target chose: "sparse" is its last
    sparse layer, "sparse:LAYER" another, counted from 0. device_step: steps wait for the device only once, and are CUDA
    graphs there (device_step.py); by default on CUDA, not with rejection sampling.
    """

    def __init__(
        self,
        target: TargetModel,
        draft: Eagle3Draft | None = None,
        tree: TreeConfig | None = None,
        *,
        pages: int | None = None,
        context: int | None = None,
        prefill_tokens: int = 512,
        max_running: int = 32,
        max_waiting: int = 1024,
        costs: CostTable | None = None,
        sampling: str = "coupled",
        synthetic_acceptance: float | None = None,
        kv_dtype: torch.dtype | None = None,
        index_dtype: torch.dtype | None = None,
        draft_attention: str = "full",
        device_step: bool | None = None,
    ):
        if sampling not in ("coupled", "rejection"):
            raise UserError(f"sampling must be coupled or rejection, got {sampling!r}")
        config = target.config
        self.tree = (tree or TreeConfig()) if draft else OFF
        self.budget = Budget(costs) if costs and draft else None
        self.context = min(context or config.max_position, config.max_position)
        rejection = sampling == "rejection"
        if device_step and rejection:
            raise UserError("rejection sampling needs the host in every step: device_step must be off")
        if device_step is None:
            device_step = target.device.type == "cuda" and not rejection
        scratch = step_slots(self.budget.shapes if self.budget else (self.tree,), ahead=device_step)
        if pages is None:
            pages = -(-min(32 * (self.context + scratch), 65_536) // config.block_size)
        shape = draft.kv_shape if draft else None
        # The last page belongs to nobody: padded rows of a device step lie there.
        cache = target.make_cache(pages + 1, draft=shape, kv_dtype=kv_dtype, index_dtype=index_dtype)
        chosen = ChosenBlocks.parse(draft_attention, target.whole, draft.config) if draft else None
        drafter = Drafter(draft, cache, chosen) if draft else None
        synthetic = None if synthetic_acceptance is None else SyntheticAcceptance(synthetic_acceptance, self.tree)
        if synthetic and self.budget:
            raise UserError("a synthetic acceptance length needs a fixed tree, not an adaptive one")
        self.runner = Runner(target, drafter, cache, rejection=rejection, synthetic=synthetic, device_step=device_step)
        limits = Limits(self.context, scratch, prefill_tokens, max_running, max_waiting)
        salt = repr((cache.k.dtype, cache.index_k.dtype, config, draft and draft.config)).encode()
        self.scheduler = Scheduler(limits, PageAllocator(pages), config.block_size, salt=salt, drafted=bool(draft))
        self.totals = EngineStats()
        self._sequences: dict[str, Sequence] = {}

    def add(self, request: Request) -> None:
        """Queues a request. Raises UserError when its id is in use, a token id is out of range, an image has no place,
        or it can never fit.
        """
        vocab = self.runner.target.config.vocab_size
        if request.id in self._sequences:
            raise UserError(f"request id {request.id!r} is in use")
        for name, ids in (
            ("prompt", request.prompt_ids),
            ("logit_bias", request.params.logit_bias),
            ("stop_token_ids", request.params.stop_token_ids),
        ):
            wrong = next((token for token in ids if not 0 <= token < vocab), None)
            if wrong is not None:
                raise UserError(f"{name} has token id {wrong}, but the vocabulary holds 0 to {vocab - 1}")
        check_images(request, self.runner.target)
        if request.grammar is not None and self.runner.synthetic is not None:
            raise UserError("response_format, tool_choice and strict tools: not where acceptance is synthetic")
        sequence = Sequence(request)
        self.scheduler.add(sequence)
        self._sequences[request.id] = sequence

    def abort(self, request_id: str) -> bool:
        """Drops a request and frees its pages at once; False when there is no such request (any more)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._drop(request_id)
        self.scheduler.finish(sequence)
        return True

    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> list[Update]:
        """Runs one step and returns what it decided, one update a request that gained tokens."""
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        updates = []
        if plan.prefill:
            self.totals.prefill_tokens += sum(count for _, count in plan.prefill)
            outcomes = self.runner.prefill(plan.prefill)
            updates += [self._apply(s, o) for (s, _), o in zip(plan.prefill, outcomes, strict=True) if o is not None]
        if plan.decode:
            # A step emits at most its depth + 1 tokens: deeper nodes than the request can still take are not drafted.
            limits = [self._remaining(sequence) - 1 for sequence in plan.decode]
            shape = self._shape(plan.decode, limits)
            # Whose prompt has just been computed joins the next step.
            joined = any(sequence.decoding for sequence, _ in plan.prefill)
            lasting = not joined and not (self.budget and self.budget.looking)
            outcomes = self.runner.decode(plan.decode, limits, shape, lasting=lasting)
            updates += [self._apply(s, o) for s, o in zip(plan.decode, outcomes, strict=True)]
        self.totals.steps += 1
        self.totals.seconds += time.perf_counter() - started
        return updates

    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[Completion]:
        """Answers all prompts, batched, and returns them in order."""
        each = params if isinstance(params, list) else [params] * len(prompts)
        collected: dict[str, list[Update]] = {}
        for index, (prompt, settings) in enumerate(zip(prompts, each, strict=True)):
            self.add(Request(f"generate-{index}", list(prompt), settings))
            collected[f"generate-{index}"] = []
        while self.has_work():
            for update in self.step():
                collected[update.id].append(update)
        return [Completion.of(updates) for updates in collected.values()]

    def start_over(self) -> None:
        """Forgets what has been served: counts, cached pages and what was accepted. Nothing must be running."""
        runner, scheduler = self.runner, self.scheduler
        if runner.device_step:
            runner.device_step.give_up_ahead()
        if runner.synthetic:
            runner.synthetic.start_over()
        self.totals, runner.clock = EngineStats(), Clock()
        scheduler.preemptions = scheduler.cached_tokens = 0
        scheduler.allocator.forget()
        if self.budget:
            self.budget = Budget(self.budget.table)

    def stats(self) -> dict[str, float | int | list[int]]:
        """Totals, the state of queue and cache, and seconds by part."""
        totals, decoded, clock, scheduler = self.totals, self.totals.decoded, self.runner.clock, self.scheduler
        synthetic = self.runner.synthetic
        parts = clock.prefill + clock.draft + clock.verify
        return {
            "steps": totals.steps,
            "verify_steps": decoded.steps,
            "emitted_tokens": decoded.completion,
            "prefill_tokens": totals.prefill_tokens,
            "drafted_tokens": decoded.drafted,
            "accepted_tokens": decoded.accepted,
            "accepted_per_depth": list(decoded.per_depth),
            "accepted_histogram": decoded.histogram,
            "acceptance_length": decoded.completion / decoded.steps if decoded.steps else None,
            "synthetic_acceptance_length": synthetic and synthetic.length,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "preemptions": scheduler.preemptions,
            "cached_prompt_tokens": scheduler.cached_tokens,
            "pages_total": scheduler.allocator.total,
            "pages_free": scheduler.allocator.free,
            "pages_cached": scheduler.allocator.cached,
            "pages_evicted": scheduler.allocator.evictions,
            "prefill_seconds": clock.prefill,
            "draft_seconds": clock.draft,
            "verify_seconds": clock.verify,
            "other_seconds": max(totals.seconds - parts, 0.0),
        }

    def _shape(self, sequences: list[Sequence], limits: list[int]) -> TreeConfig:
        if self.budget is None:
            return self.tree
        ids, contexts = [s.request.id for s in sequences], [len(s.token_ids) for s in sequences]
        kinds = ["greedy" if s.params.greedy else "sampled" for s in sequences]
        waiting = sum(s.computed + 1 - s.draft_end for s in sequences)
        return self.budget.choose(ids, kinds, contexts, limits, waiting)

    def _drop(self, request_id: str) -> None:
        self._sequences.pop(request_id)
        if self.budget:
            self.budget.forget(request_id)

    def _remaining(self, sequence: Sequence) -> int:
        """Tokens the request may still emit; at least 1 while it runs."""
        return min(sequence.params.max_tokens - sequence.output_length, self.context - len(sequence.token_ids))

    def _apply(self, sequence: Sequence, outcome: Outcome) -> Update:
        """Takes decided tokens over up to the first that ends the answer, which is itself only kept when it is text."""
        params, remaining = sequence.params, self._remaining(sequence)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._eos))
        tokens, reason, stop_token = outcome.tokens[:remaining], None, None
        for index, token in enumerate(tokens):
            if token in stops:
                tokens, reason, stop_token = tokens[:index], "stop", token
                break
        # The stop token is a decided token too: it counts as emitted, though it is not part of the answer.
        emitted = len(tokens) + (stop_token is not None)
        if reason is None and emitted == remaining:
            reason = "length"
        sequence.token_ids += tokens
        if sequence.constraint is not None and stop_token in self._eos:
            answer = sequence.token_ids[sequence.prompt_length :]
            reason = "stop" if sequence.constraint.finished(answer) else "length"
        step = verified = None
        if outcome.tree is not None:
            verified = Verified(outcome.tree, outcome.path)
            step = StepRecord(len(outcome.tree) - 1, min(len(outcome.path), emitted), emitted, *outcome.seconds)
            self.totals.decoded.add_step(step, step.accepted)
            self.totals.decoded.completion += emitted
            if self.budget:
                self.budget.learn(sequence.request.id, outcome.tree, outcome.path)
        if reason is not None:
            self._drop(sequence.request.id)
            self.scheduler.finish(sequence)
        logprobs = None if outcome.logprobs is None else outcome.logprobs[: len(tokens)]
        depths = outcome.depths[: len(tokens)]
        return Update(
            sequence.request.id,
            tokens,
            depths,
            logprobs,
            reason,
            stop_token,
            step,
            cached_tokens=sequence.cached_tokens or 0,
            queue_seconds=sequence.queue_seconds,
            verified=verified,
            prompt_logprobs=sequence.prompt_logprobs if params.prompt_logprobs and step is None else None,
        )

    @property
    def _eos(self) -> tuple[int, ...]:
        return self.runner.target.config.eos_token_ids
