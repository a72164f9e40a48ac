"""What filters leave of a row, and the choice among it: by definition, by the short cut, and by the kernel."""

import pytest
import torch

from serve.noise import NoiseStream, gumbel, upcoming
from serve.request import Request, SamplingParams, Sequence
from serve.sampling import Row, Survivors, choose, filtered
from target_model.kernels import ops
from target_model.kernels.sample_tokens_ref import thresholds

VOCAB = 300
SETTINGS = (
    SamplingParams(temperature=0.7, top_k=40, top_p=0.95, seed=3),
    SamplingParams(temperature=1.0, top_k=5, min_p=0.2, seed=2**64 - 1),
    SamplingParams(temperature=1.3, top_k=1, seed=-7),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=2.0, top_k=64, top_p=0.5, min_p=0.01, seed=2**63),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=1.5, top_p=0.9, seed=12),
    SamplingParams(temperature=1.1, top_k=2**40, min_p=0.1, seed=13),
)


def rows_of(*params: SamplingParams, trial: int = 0) -> list[Row]:
    """Rows at different positions and choices of different requests."""
    return [
        Row(Sequence(Request(f"r{i}", [1] * (1 + trial + i), each, choice_index=i % 3)), (2,) * (i % 2))
        for i, each in enumerate(params)
    ]


def by_definition(logits: torch.Tensor, row: Row) -> int:
    """One row, from the words of `SamplingParams`: sorted, cut, and the noise of the whole vocabulary added."""
    params, keys = row.sequence.params, ([row.sequence.seed], [row.sequence.request.choice_index], [row.position])
    if params.greedy:
        return int(logits.argmax())
    x = logits / params.temperature
    ordered = sorted(x.tolist(), reverse=True)
    ordered = ordered[: params.top_k or VOCAB]
    weights = torch.tensor(ordered, dtype=torch.float64).softmax(0).tolist()
    limit, mass = ordered[0], 0.0
    for value, weight in zip(ordered, weights, strict=True):
        if mass >= params.top_p or weight < params.min_p * weights[0]:
            break
        limit, mass = value, mass + weight
    return int((x + gumbel(*keys, VOCAB, "cpu")[0]).masked_fill(x < limit, -torch.inf).argmax())


def some_logits(trial: int) -> torch.Tensor:
    logits = 3 * torch.randn(len(SETTINGS), VOCAB, generator=torch.Generator().manual_seed(trial))
    return logits.round() if trial % 2 else logits  # every second time with many ties


def test_the_choice_is_the_one_of_the_definition():
    for trial in range(60):
        rows, logits = rows_of(*SETTINGS, trial=trial), some_logits(trial)
        want = [by_definition(own, row) for own, row in zip(logits, rows, strict=True)]
        assert choose(logits, rows, ()).tolist() == want
        alone = [choose(own[None], [row], ()).item() for own, row in zip(logits, rows, strict=True)]
        assert alone == want, "in whatever company"


@pytest.mark.parametrize("trial", [0, 1])
def test_the_kernel_chooses_the_same(monkeypatch, trial):
    rows, logits = rows_of(*SETTINGS, trial=trial), some_logits(trial)
    want = choose(logits, rows, ())
    monkeypatch.setattr(ops, "override", "triton")
    assert torch.equal(choose(logits, rows, ()), want)


def test_survivors_are_what_the_filters_leave_of_the_whole_vocabulary():
    settings = SETTINGS[:5]
    for trial in range(0, 20, 2):
        rows, logits = rows_of(*settings), some_logits(trial)[:5]
        best, whole = Survivors.of(logits, [row.sequence.params for row in rows]), filtered(logits, rows)
        assert torch.equal(best.values_NK, whole.gather(1, best.ids_NK))
        assert (best.values_NK > -torch.inf).sum() == (whole > -torch.inf).sum()


def test_entries_that_tie_across_the_top_k_stay_together():
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, [3, 7, 9]] = torch.tensor([2.0, 1.5, 1.5])
    rows = [rows_of(SamplingParams(top_k=2, seed=seed))[0] for seed in range(200)]
    assert set(choose(logits.expand(200, -1), rows, ()).tolist()) == {3, 7, 9}


def test_no_top_k_means_no_short_cut():
    logits = torch.randn(2, VOCAB)
    assert Survivors.of(logits, [SamplingParams(top_k=40), SamplingParams(top_p=0.9)]) is None


def test_a_neighbour_with_filters_cuts_nothing():
    """The sum of a peaked row's probabilities rounds to 1 long before its end."""
    x = torch.zeros(3, VOCAB)
    x[:, 5] = 20.0
    top_k, top_p, min_p = torch.tensor([0, 40, 0]), torch.tensor([1.0, 1.0, 0.5]), torch.zeros(3)
    assert thresholds(x, top_k, top_p, min_p)[:, 0].tolist() == [-torch.inf, 0.0, 20.0]


def test_kept_noise_is_that_of_its_position():
    streams = [NoiseStream(11, 0), NoiseStream(11, 2)]
    upcoming(streams, (5, 90), 3, VOCAB, "cpu")
    drawn_before = streams[0].rows[7]
    upcoming(streams, (7, 91), 2, VOCAB, "cpu")
    assert streams[0].rows[7] is drawn_before, "a row that was not used is not drawn again"
    streams = [NoiseStream(11, 0), NoiseStream(11, 2)]
    for positions, levels in (((5, 90), 3), ((6, 93), 4), ((6, 94), 2), ((40, 95), 1)):
        drawn = upcoming(streams, positions, levels, VOCAB, "cpu")
        for row, (stream, position) in enumerate(zip(streams, positions, strict=True)):
            places = range(position, position + levels)
            expected = gumbel([stream.seed] * levels, [stream.choice] * levels, places, VOCAB, "cpu")
            assert torch.equal(drawn[row], expected)
            assert min(stream.rows) == position
