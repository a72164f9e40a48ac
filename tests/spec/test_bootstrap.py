"""Bootstrap intervals against ones that are known, and the correction for many comparisons."""

import numpy as np
import pytest

from spec.bench.bootstrap import difference, holm, interval


def sample(seed: int, prompts: int = 40) -> tuple[list, list, list]:
    """Prompts whose steps emit 1 + Poisson(2) tokens on average: an acceptance length of 3."""
    random = np.random.default_rng(seed)
    steps = random.integers(10, 30, prompts)
    return list(range(prompts)), [float(s + random.poisson(2 * s)) for s in steps], [float(s) for s in steps]


def test_an_interval_covers_the_truth_as_often_as_it_says():
    hits = 0
    for seed in range(100):
        low, high = interval(*sample(seed))
        assert low < high
        hits += low <= 3 <= high
    assert 88 <= hits <= 99


def test_equal_prompts_leave_no_doubt_and_one_prompt_says_nothing():
    assert interval([1, 2, 3], [6, 6, 6], [2, 2, 2]) == (3, 3)
    assert interval(["a", "a"], [6, 7], [2, 2]) is None
    assert interval([1, 2], [0, 0], [0, 0]) is None


def test_entries_of_one_prompt_are_drawn_together():
    """Repeating every prompt must not shrink the interval."""
    keys, above, below = sample(0)
    assert interval(keys * 4, above * 4, below * 4) == pytest.approx(interval(keys, above, below))
    parts = interval([*keys, *keys], [*above, *[1.0] * 40], [*below, *[0.0] * 40])
    assert parts == pytest.approx(interval(keys, [value + 1 for value in above], below))


def test_pairing_finds_a_small_difference_between_unlike_prompts():
    keys = list(range(12))
    a = keys, [10.0 * (i + 1) for i in keys], [10.0] * 12
    b = keys, [10.0 * (i + 1) + 2 + i % 3 for i in keys], [10.0] * 12
    found = difference(a, b)
    assert found.value == pytest.approx(0.3) and 0 < found.low < found.value < found.high and found.p < 0.01
    assert interval(*a)[1] - interval(*a)[0] > 10 * found.value  # unpaired it would drown
    same = difference(a, a)
    assert same.value == same.low == same.high == 0 and same.p == 1
    assert difference(a, ([99, 98], [1, 2], [1, 1])) is None


def test_chance_alone_is_seldom_called_a_difference():
    found = [difference(sample(seed), sample(1000 + seed)) for seed in range(60)]
    assert sum(each.p < 0.05 for each in found) <= 8


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []
