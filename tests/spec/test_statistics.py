"""The figures of the acceptance benchmark against a trace worked out by hand."""

import pytest

from serve.request import StepRecord
from spec.bench.statistics import NOTHING, measure

# Five steps of a chain of 5. The third is cut after two tokens by max_tokens although four drafted ones matched; the
# fifth is cut by a stop behind its first token. Emitted: 3 + 1 + 2 + 6 + 1 = 13. Kept: 2 + 0 + 2 + 5 + 1 = 10.
TRACE = [
    StepRecord(drafted=5, accepted=2, emitted=3),
    StepRecord(drafted=5, accepted=0, emitted=1),
    StepRecord(drafted=5, accepted=4, emitted=2),
    StepRecord(drafted=5, accepted=5, emitted=6),
    StepRecord(drafted=3, accepted=3, emitted=1),
]


def test_figures_equal_the_trace():
    result = measure(TRACE, depth=5)
    assert (result.steps, result.drafted, result.accepted, result.emitted) == (5, 23, 10, 13)
    assert result.length == pytest.approx(13 / 5, abs=1e-9)
    assert result.rate == pytest.approx(10 / 23, abs=1e-9)
    assert result.histogram == (1, 1, 2, 0, 0, 1)
    # At least 1: steps 1, 3, 4, 5; at least 2: 1, 3, 4; at least 3, 4, 5: step 4 alone.
    assert result.per_position == pytest.approx((4 / 5, 3 / 5, 1 / 5, 1 / 5, 1 / 5), abs=1e-9)


def test_rates_are_shares_and_do_not_increase_with_the_position():
    result = measure(TRACE, depth=5)
    shares = [result.rate, *result.per_position]
    assert all(0 <= share <= 1 for share in shares)
    assert list(result.per_position) == sorted(result.per_position, reverse=True)


def test_nothing_cut_means_one_plus_the_accepted_tokens_of_a_step():
    whole = [step for step in TRACE if step.emitted == step.accepted + 1]
    result = measure(whole, depth=5)
    assert result.length == pytest.approx(1 + result.accepted / result.steps, abs=1e-9)


def test_no_rate_from_zero_drafts():
    plain = measure([StepRecord(drafted=0, accepted=0, emitted=1)] * 4, depth=0)
    assert plain.length == 1
    assert plain.rate is None and plain.per_position is None
    empty = measure([], depth=3)
    assert empty.length is None and empty.rate is None and empty.per_position is None


def test_the_denominator_is_what_was_drafted_and_not_what_was_configured():
    short = measure([StepRecord(drafted=2, accepted=2, emitted=3)], depth=5)
    assert short.rate == 1


def test_conditional_acceptance_is_among_the_steps_that_came_so_far():
    # Reached positions 0..5: 5, 4, 3, 1, 1, 1 steps.
    assert measure(TRACE, depth=5).conditional == pytest.approx((4 / 5, 3 / 4, 1 / 3, 1, 1))
    short = measure([StepRecord(drafted=3, accepted=0, emitted=1)], depth=3)
    assert short.conditional == (0, None, None)
    assert measure([], depth=2).conditional is None


def test_sums_of_parts_are_the_whole():
    parts = measure(TRACE[:2], depth=2) + measure(TRACE[2:], depth=5)
    assert parts == measure(TRACE, depth=5) and parts.verified == 28
    assert NOTHING + parts == parts + NOTHING == parts


def test_a_trace_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="2 accepted of 1 drafted"):
        measure([StepRecord(drafted=1, accepted=2, emitted=3)], depth=5)


def test_json_carries_every_figure():
    figures = measure(TRACE, depth=5).to_json()
    assert figures["AL"] == 2.6 and figures["histogram"] == [1, 1, 2, 0, 0, 1]
    assert measure([], depth=1).to_json()["accepted_per_drafted"] is None
