"""Who runs in the next step: pages are reserved before it; what does not fit waits or is computed again later.

Prefixes that some sequence has computed before are taken from the cache, page by page.
"""

import time
from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple

from serve.pages import PageAllocator, prefix_keys
from serve.request import Sequence
from target_model.errors import UserError

# A request of priority p is overtaken by at most p * PATIENCE later ones of priority 0: nobody starves.
PATIENCE = 256


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


class Entry(NamedTuple):
    """A sequence in the order of the schedule: no two have the same rank and arrival."""

    rank: int
    arrival: int
    sequence: Sequence


class Scheduler:
    """Continuous batching. Lower priority values go first, then earlier arrivals; the last in that order is preempted
    first.

    `salt` enters the keys of cached pages. `drafted`: pages also hold the rows of a draft, which follows one behind.
    """

    def __init__(
        self, limits: Limits, allocator: PageAllocator, page_size: int, *, salt: bytes = b"", drafted: bool = False
    ):
        self.limits, self.allocator, self.page_size = limits, allocator, page_size
        self.salt, self.drafted = salt, drafted
        self.waiting: list[Entry] = []
        self.running: list[Entry] = []
        self.preemptions = self.cached_tokens = 0
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
        rank = self._arrivals + PATIENCE * sequence.request.priority
        insort(self.waiting, Entry(rank, self._arrivals, sequence))

    def schedule(self) -> Schedule:
        """Picks the next step's work and reserves its pages."""
        plan = Schedule()
        for entry in self.running:
            self._publish(entry.sequence)
        for entry in list(self.running):
            if entry in self.running and entry.sequence.decoding and self._reserve(entry):
                plan.decode.append(entry.sequence)
        # A later entry may have been preempted after it was planned.
        alive = {id(entry.sequence) for entry in self.running}
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
        self.running = [entry for entry in self.running if entry.sequence is not sequence]
        self.waiting = [entry for entry in self.waiting if entry.sequence is not sequence]
        self._free(sequence)

    def _admit(self) -> None:
        """Moves waiting sequences to running while the pages for their whole prefill and first step are there.

        One whose next page is just being computed by a running sequence lets others pass until it can share that page.
        """
        coming = {key for _, _, s in self.running for key in s.page_keys[s.published // self.page_size :]}
        for entry in list(self.waiting):
            sequence = entry.sequence
            # At least one token is left to compute: its logits choose the next one.
            reusable = (sequence.prefill_end - 1) // self.page_size
            if sequence.params.prompt_logprobs:
                reusable = 0  # every prompt token's logits are wanted
            keys = prefix_keys(sequence, self.salt, self.page_size)[:reusable]
            missing = next((key for key in keys if not self.allocator.holds(key)), None)
            if missing in coming:
                continue
            if len(self.running) >= self.limits.max_running or not self._start(sequence, keys):
                return
            coming.update(sequence.page_keys[sequence.published // self.page_size :])
            self.waiting.remove(entry)
            insort(self.running, entry)

    def _start(self, sequence: Sequence, keys: list[bytes]) -> bool:
        """Cached pages for its prefix and empty ones for the rest; False, and nothing taken, if there are too few."""
        pages = self.allocator.take_prefix(keys)
        sequence.restart(pages, len(pages) * self.page_size)
        if not self._extend(sequence, sequence.prefill_end + self.limits.scratch):
            self._free(sequence)
            return False
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            sequence.queue_seconds = time.perf_counter() - sequence.queued
            self.cached_tokens += sequence.computed
        return True

    def _reserve(self, entry: Entry) -> bool:
        """Pages for a verify step; the last running sequences give theirs up until it fits. False if `entry` itself had
        to.
        """
        while not self._extend(entry.sequence, len(entry.sequence.token_ids) + self.limits.scratch):
            victim = self.running.pop()
            self.preemptions += 1
            self._free(victim.sequence)
            insort(self.waiting, victim)
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

    def _publish(self, sequence: Sequence) -> None:
        """Offers the pages that are full of decided tokens by now to others. A page also needs the taps of its last
        position, which the draft keeps when it computes the row behind the page.
        """
        size = self.page_size
        complete = min(sequence.computed, sequence.draft_end - 1) if self.drafted else sequence.computed
        if complete // size > sequence.published // size:
            keys = prefix_keys(sequence, self.salt, size)[: complete // size]
            for page in range(sequence.published // size, len(keys)):
                self.allocator.publish(sequence.pages[page], keys[page])
            sequence.published = len(keys) * size

    def _free(self, sequence: Sequence) -> None:
        self._publish(sequence)
        self.allocator.release(sequence.pages)
        sequence.restart([], 0)

    def _pages_for(self, slots: int) -> int:
        return -(-slots // self.page_size)
