"""What came of verify steps: counted for one answer, for a server, and for all that an engine has done."""

from dataclasses import dataclass
from itertools import zip_longest

from serve.request import StepRecord


@dataclass
class Counts:
    """Token counts of one answer, or the sum over several.

    completion counts every token the model decided within the answer, the one that ended it included. Of the verify
    steps: drafted nodes, and drafted tokens that became part of the answer; per_depth[d] counts steps that kept one
    at depth d + 1; seconds are the answer's share of its steps. cached counts prompt tokens that were not computed
    again, once for all answers to a prompt.
    """

    completion: int = 0
    cached: int = 0
    reasoning: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    per_depth: tuple[int, ...] = ()
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def add_step(self, step: StepRecord, accepted: int) -> None:
        self.steps += 1
        self.drafted += step.drafted
        self.accepted += accepted
        self.draft_seconds += step.draft_seconds
        self.verify_seconds += step.verify_seconds
        self.per_depth = tuple(map(sum, zip_longest(self.per_depth, (1,) * accepted, fillvalue=0)))

    def merge(self, other: "Counts") -> None:
        self.completion += other.completion
        self.cached += other.cached
        self.reasoning += other.reasoning
        self.steps += other.steps
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.draft_seconds += other.draft_seconds
        self.verify_seconds += other.verify_seconds
        self.per_depth = tuple(map(sum, zip_longest(self.per_depth, other.per_depth, fillvalue=0)))

    @property
    def histogram(self) -> list[int]:
        """Verify steps by the number of drafted tokens kept, from 0."""
        reached = (self.steps, *self.per_depth, 0)
        return [reached[kept] - reached[kept + 1] for kept in range(len(self.per_depth) + 1)]

    @property
    def acceptance_length(self) -> float | None:
        """Drafted tokens kept per verify step, plus the target's own one."""
        return self.accepted / self.steps + 1 if self.steps else None
