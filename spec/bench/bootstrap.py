"""Confidence intervals and comparisons of ratios of sums, by resampling prompts.

An acceptance length is a sum of tokens over a sum of steps, a speed-up a sum of seconds over another. Steps of one
prompt resemble each other, so prompts are what is drawn, with all of their steps.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

DRAWS, LEVEL, SEED = 2000, 0.95, 0


@dataclass(frozen=True)
class Difference:
    """b - a of two ratios over the same prompts; `low` and `high` bound it at 95 %.

    p: two-sided, how often a bootstrap difference falls on the other side of zero.
    """

    value: float
    low: float
    high: float
    p: float


def interval(keys: Sequence[Hashable], above: Sequence[float], below: Sequence[float]) -> tuple[float, float] | None:
    """Bounds of sum(above) / sum(below); entries of one key are drawn together. None with fewer than two keys, or
    where a sum below is zero.
    """
    parts = _by_key(keys, above, below)
    if len(parts) < 2:
        return None
    ratios = _ratios(_draws(len(parts)), np.array(list(parts.values())))
    return None if ratios is None else _bounds(ratios)


def difference(
    a: tuple[Sequence[Hashable], Sequence[float], Sequence[float]],
    b: tuple[Sequence[Hashable], Sequence[float], Sequence[float]],
) -> Difference | None:
    """Of two measurements (keys, above, below) of the same prompts: each draw takes the same prompts from both.

    Only keys of both count. None with fewer than two of them.
    """
    parts_a, parts_b = _by_key(*a), _by_key(*b)
    common = [key for key in parts_a if key in parts_b]
    if len(common) < 2:
        return None
    draws = _draws(len(common))
    both = [np.array([parts[key] for key in common]) for parts in (parts_a, parts_b)]
    drawn = [_ratios(draws, parts) for parts in both]
    if drawn[0] is None or drawn[1] is None:
        return None
    first, second = (parts[:, 0].sum() / parts[:, 1].sum() for parts in both)
    spread = drawn[1] - drawn[0]
    # One draw on each side is added: 2,000 draws cannot show that a chance is zero.
    tails = ((spread <= 0).sum() + 1, (spread >= 0).sum() + 1)
    return Difference(float(second - first), *_bounds(spread), float(min(1.0, 2 * min(tails) / (DRAWS + 1))))


def holm(values: Sequence[float]) -> list[float]:
    """p values corrected for their number (Holm's step-down): the chance of any false alarm stays below the level."""
    corrected, largest = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        corrected[place] = largest
    return corrected


def _by_key(
    keys: Sequence[Hashable], above: Sequence[float], below: Sequence[float]
) -> dict[Hashable, tuple[float, float]]:
    sums: dict[Hashable, tuple[float, float]] = {}
    for key, a, b in zip(keys, above, below, strict=True):
        old = sums.get(key, (0.0, 0.0))
        sums[key] = old[0] + a, old[1] + b
    return sums


def _draws(count: int) -> np.ndarray:
    """How often each of `count` prompts is in each draw, [DRAWS, count]."""
    return np.random.default_rng(SEED).multinomial(count, [1 / count] * count, size=DRAWS)


def _ratios(draws: np.ndarray, parts: np.ndarray) -> np.ndarray | None:
    sums = draws @ parts
    return None if (sums[:, 1] <= 0).any() else sums[:, 0] / sums[:, 1]


def _bounds(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
