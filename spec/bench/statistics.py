"""Acceptance figures from the trace of verify steps: pure arithmetic, no model."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from serve.request import StepRecord

DEFINITIONS = {
    "verify step": "one target forward pass over a drafted chain or tree",
    "AL": "acceptance length: tokens emitted by verify steps / verify steps; each step's emission ends with the bonus "
    "token, the target's own; the token that the prefill yields is not counted",
    "accepted": "drafted tokens that were kept; in a step cut by a stop or the token limit at most the tokens emitted",
    "drafted": "nodes of the chain or tree without the root",
    "kept": "accepted / drafted: share of drafted tokens kept; n/a where nothing was drafted",
    "verified": "tokens that the target scored in verify steps: the drafted ones and a root for each step",
    "per position": "joint acceptance: share of all verify steps that accepted at least that many drafted tokens",
    "conditional": "share of the steps that accepted at least i - 1 drafted tokens which accepted the i-th as well",
    "histogram": "verify steps by number of accepted tokens, from 0",
    "speed-up": "seconds of plain decoding / seconds of speculative decoding, whole requests, same prompts, same run",
    "decoding": "the same ratio without the prefill, which speculation cannot speed up",
    "as plain": "answers equal to plain decoding token for token, ended alike; sampled ones with the same seed",
    "interval": "95 %, percentile bootstrap over prompts, a prompt with its turns and repeated seeds at a time, 2,000 "
    "draws; it says how far other prompts of the kind would move the figure, not how other hardware would",
}


@dataclass(frozen=True)
class Acceptance:
    """Counts over verify steps; `histogram[a]` steps accepted exactly `a` tokens, up to the depth of the tree."""

    steps: int
    drafted: int
    accepted: int
    emitted: int
    histogram: tuple[int, ...]

    def __add__(self, other: "Acceptance") -> "Acceptance":
        """Sums; the histogram is as long as the longer one."""
        longest = max(len(self.histogram), len(other.histogram))
        both = ([*each.histogram, *[0] * (longest - len(each.histogram))] for each in (self, other))
        return Acceptance(
            self.steps + other.steps,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.emitted + other.emitted,
            tuple(a + b for a, b in zip(*both, strict=True)),
        )

    @property
    def verified(self) -> int:
        """Tokens that the target scored: drafted ones and roots."""
        return self.drafted + self.steps

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

    @property
    def conditional(self) -> tuple[float | None, ...] | None:
        """Acceptance of draft positions 1..depth among the steps that accepted all before; None where no step did."""
        if not self.drafted:
            return None
        reached = [sum(self.histogram[i:]) for i in range(len(self.histogram))]
        return tuple(more / all_before if all_before else None for all_before, more in pairwise(reached))

    def to_json(self) -> dict:
        return {
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "AL": self.length,
            "accepted_per_drafted": self.rate,
            "verified": self.verified,
            "per_position": self.per_position and list(self.per_position),
            "conditional": self.conditional and list(self.conditional),
            "histogram": list(self.histogram),
        }


NOTHING = Acceptance(0, 0, 0, 0, (0,))


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
