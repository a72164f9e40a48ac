"""Who runs in the next step: pages are reserved before it; what does not fit waits or is computed again later."""

from dataclasses import dataclass, field

from serve.pages import PageAllocator
from serve.request import Sequence
from target_model.errors import UserError


@dataclass(frozen=True)
class Limits:
    """Bounds of the schedule.

    context: tokens of prompt and answer together. scratch: slots a step may write behind the committed ones.
    prefill_tokens: prompt tokens computed in one step. max_running, max_waiting: sequences.
    """

    context: int
    scratch: int
    prefill_tokens: int = 512
    max_running: int = 32
    max_waiting: int = 1024


@dataclass
class Schedule:
    """One step's work: prompt chunks as (sequence, tokens), and sequences that verify a tree."""

    prefill: list[tuple[Sequence, int]] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Continuous batching. Lower priority values go first, then earlier arrivals; the last in that order is preempted
    first.
    """

    def __init__(self, limits: Limits, allocator: PageAllocator, page_size: int):
        self.limits, self.allocator, self.page_size = limits, allocator, page_size
        self.waiting: list[tuple[int, int, Sequence]] = []
        self.running: list[tuple[int, int, Sequence]] = []
        self.preemptions = 0
        self._arrivals = 0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises UserError when it can never fit or the queue is full."""
        limits, length = self.limits, sequence.prompt_length
        if length == 0:
            raise UserError("the prompt is empty: it must have at least 1 token")
        if length >= limits.context:
            raise UserError(f"the prompt has {length} tokens, but the context holds {limits.context}, answer included")
        longest = min(length + sequence.params.max_tokens, limits.context)
        if self._pages_for(longest + limits.scratch) > self.allocator.total:
            raise UserError(
                f"prompt and answer may take {longest} tokens, "
                f"but the cache holds {self.allocator.total * self.page_size} slots"
            )
        if len(self.waiting) >= limits.max_waiting:
            raise UserError(f"the queue is full: {limits.max_waiting} requests are waiting")
        self._arrivals += 1
        self.waiting.append((sequence.request.priority, self._arrivals, sequence))
        self.waiting.sort(key=lambda entry: entry[:2])

    def schedule(self) -> Schedule:
        """Picks the next step's work and reserves its pages."""
        plan = Schedule()
        for entry in list(self.running):
            if entry in self.running and entry[2].decoding and self._reserve(entry):
                plan.decode.append(entry[2])
        # A later entry may have been preempted after it was planned.
        alive = {id(sequence) for _, _, sequence in self.running}
        plan.decode = [sequence for sequence in plan.decode if id(sequence) in alive]
        budget = self.limits.prefill_tokens
        self._admit()
        for _, _, sequence in self.running:
            left = min(budget, sequence.prefill_end - sequence.computed)
            if left > 0 and not sequence.decoding:
                plan.prefill.append((sequence, left))
                budget -= left
        return plan

    def finish(self, sequence: Sequence) -> None:
        """Forgets a sequence, running or waiting, and frees its pages."""
        self.running = [entry for entry in self.running if entry[2] is not sequence]
        self.waiting = [entry for entry in self.waiting if entry[2] is not sequence]
        self._free(sequence)

    def _admit(self) -> None:
        """Moves waiting sequences to running while the pages for their whole prefill and first step are free."""
        while self.waiting and len(self.running) < self.limits.max_running:
            entry = self.waiting[0]
            if not self._extend(entry[2], entry[2].prefill_end + self.limits.scratch):
                return
            self.running.append(self.waiting.pop(0))
            self.running.sort(key=lambda item: item[:2])

    def _reserve(self, entry: tuple[int, int, Sequence]) -> bool:
        """Pages for a verify step; the last running sequences give theirs up until it fits. False if `entry` itself had
        to.
        """
        while not self._extend(entry[2], len(entry[2].token_ids) + self.limits.scratch):
            victim = self.running.pop()
            self.preemptions += 1
            self._free(victim[2])
            self.waiting.append(victim)
            self.waiting.sort(key=lambda item: item[:2])
            if victim is entry:
                return False
        return True

    def _extend(self, sequence: Sequence, slots: int) -> bool:
        missing = self._pages_for(slots) - len(sequence.pages)
        if missing > 0:
            pages = self.allocator.allocate(missing)
            if pages is None:
                return False
            sequence.pages += pages
        return True

    def _free(self, sequence: Sequence) -> None:
        self.allocator.release(sequence.pages)
        sequence.pages, sequence.computed, sequence.root_state = [], 0, None

    def _pages_for(self, slots: int) -> int:
        return -(-slots // self.page_size)
