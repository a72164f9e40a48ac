"""Acceptance figures from the trace of verify steps: pure arithmetic, no model."""

from collections.abc import Iterable
from dataclasses import dataclass

from serve.request import StepRecord

DEFINITIONS = {
    "verify step": "one target forward pass over a drafted chain or tree",
    "AL": "acceptance length: tokens emitted by verify steps / verify steps; each step's emission ends with the bonus "
    "token, the target's own; the token that the prefill yields is not counted",
    "accepted": "drafted tokens that were kept; in a step cut by a stop or the token limit at most the tokens emitted",
    "drafted": "nodes of the chain or tree without the root",
    "accepted/drafted": "share of drafted tokens kept; n/a where nothing was drafted",
    "per position": "joint acceptance: share of all verify steps that accepted at least that many drafted tokens",
    "histogram": "verify steps by number of accepted tokens, from 0",
    "speed-up": "seconds of plain decoding / seconds of speculative decoding, whole requests, same prompts, same run",
    "decoding": "the same ratio without the prefill, which speculation cannot speed up",
}


@dataclass(frozen=True)
class Acceptance:
    """Counts over verify steps; `histogram[a]` steps accepted exactly `a` tokens, up to the depth of the tree."""

    steps: int
    drafted: int
    accepted: int
    emitted: int
    histogram: tuple[int, ...]

    @property
    def length(self) -> float | None:
        """AL, or None without a verify step."""
        return self.emitted / self.steps if self.steps else None

    @property
    def rate(self) -> float | None:
        """accepted / drafted, or None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def per_position(self) -> tuple[float, ...] | None:
        """Joint acceptance of draft positions 1..depth, or None where nothing was drafted."""
        if not self.drafted:
            return None
        return tuple(sum(self.histogram[i:]) / self.steps for i in range(1, len(self.histogram)))

    def to_json(self) -> dict:
        return {
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "AL": self.length,
            "accepted_per_drafted": self.rate,
            "per_position": self.per_position and list(self.per_position),
            "histogram": list(self.histogram),
        }


def measure(steps: Iterable[StepRecord], depth: int) -> Acceptance:
    """Adds up a trace. `depth` is the deepest a draft can go (k of a chain): the histogram has depth + 1 entries."""
    count = drafted = accepted = emitted = 0
    histogram = [0] * (depth + 1)
    for step in steps:
        # A step cut short by a stop or by the token limit keeps no more drafted tokens than it emitted.
        kept = min(step.accepted, step.emitted)
        if not 0 <= kept <= min(depth, step.drafted):
            raise ValueError(f"a step claims {kept} accepted of {step.drafted} drafted at depth {depth}")
        count += 1
        drafted += step.drafted
        accepted += kept
        emitted += step.emitted
        histogram[kept] += 1
    return Acceptance(count, drafted, accepted, emitted, tuple(histogram))
