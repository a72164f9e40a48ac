"""The short cut through a row's best entries chooses what the filters over the whole vocabulary do."""

import torch

from serve.noise import NoiseStream, gumbel, upcoming
from serve.request import Request, SamplingParams, Sequence
from serve.sampling import Row, Survivors, choose, filtered

VOCAB = 300


def rows_of(*params: SamplingParams) -> list[Row]:
    return [Row(Sequence(Request(f"r{i}", [1], each)), ()) for i, each in enumerate(params)]


SETTINGS = (
    SamplingParams(temperature=0.7, top_k=40, top_p=0.95),
    SamplingParams(temperature=1.0, top_k=5, min_p=0.2),
    SamplingParams(temperature=1.3, top_k=1),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=2.0, top_k=64, top_p=0.5, min_p=0.01),
)


def test_same_choice_as_the_whole_vocabulary():
    generator = torch.Generator().manual_seed(0)
    for trial in range(50):
        rows = rows_of(*SETTINGS)
        logits = 3 * torch.randn(len(rows), VOCAB, generator=generator)
        noise = gumbel([trial] * len(rows), [0] * len(rows), range(len(rows)), VOCAB, "cpu")
        noise[3] = 0  # the greedy row
        best = Survivors.of(logits, [row.sequence.params for row in rows])
        whole = filtered(logits, rows)
        assert torch.equal(best.values_NK, whole.gather(1, best.ids_NK))
        assert (best.values_NK > -torch.inf).sum() == (whole > -torch.inf).sum()
        assert torch.equal(choose(logits, rows, noise, ()), (whole + noise).argmax(-1))


def test_entries_that_tie_across_the_top_k_stay_together():
    rows = rows_of(SamplingParams(top_k=2))
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, [3, 7, 9]] = torch.tensor([2.0, 1.0, 1.0])
    assert Survivors.of(logits, [rows[0].sequence.params]) is None
    noise = torch.zeros(1, VOCAB)
    for token in (3, 7, 9):
        noise.zero_()[0, token] = 9.0
        assert choose(logits, rows, noise, ()).tolist() == [token]
    noise.zero_()[0, 11] = 6.5
    assert choose(logits, rows, noise, ()).tolist() == [3], "outside the top-k whatever its noise"


def test_no_top_k_means_no_short_cut():
    logits = torch.randn(2, VOCAB)
    assert Survivors.of(logits, [SamplingParams(top_k=40), SamplingParams(top_p=0.9)]) is None


def test_equal_noisy_values_give_the_lowest_id():
    rows = rows_of(SamplingParams(top_k=3))
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, [8, 4, 6]] = torch.tensor([3.0, 2.0, 1.0])
    noise = torch.zeros(1, VOCAB)
    noise[0, [8, 4, 6]] = torch.tensor([0.0, 1.0, 2.0])
    assert choose(logits, rows, noise, ()).tolist() == [4]


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
