"""The noise is Philox4x32-10 to the bit, and standard Gumbel."""

import math

import torch

from serve.noise import gumbel
from target_model.kernels.gumbel_ref import philox


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value], dtype=torch.int64) for value in values)


def test_philox_known_answers():
    """The vectors published with Random123 (kat_vectors, philox4x32 10)."""
    ones = 0xFFFFFFFF
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones, ones, ones, ones), (ones, ones), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in cases:
        assert tuple(word.item() for word in philox(words(*counter), words(*key))) == expected


def test_noise_depends_on_each_coordinate_and_on_nothing_else():
    alone = gumbel([7], [0], [5], 301, "cpu")
    crowd = gumbel([7, 7, 7, 8, 7 + 2**64], [0, 0, 1, 0, 0], [5, 6, 5, 5, 5], 301, "cpu")
    assert torch.equal(alone[0], crowd[0]) and torch.equal(alone[0], crowd[4])
    for other in (1, 2, 3):
        assert not torch.isclose(crowd[0], crowd[other]).any()
    assert torch.equal(gumbel([7], [0], [5], 40, "cpu"), alone[:, :40])
    assert torch.equal(gumbel([-1], [0], [5], 40, "cpu"), gumbel([2**64 - 1], [0], [5], 40, "cpu"))


def test_noise_is_standard_gumbel():
    sample = gumbel(list(range(40)), [0] * 40, [3] * 40, 5000, "cpu").flatten().double()
    assert sample.isfinite().all()
    # Mean gamma and variance pi^2 / 6, within five standard errors.
    count = sample.numel()
    assert abs(sample.mean() - 0.5772156649) < 5 * math.sqrt(math.pi**2 / 6 / count)
    assert abs(sample.var() - math.pi**2 / 6) < 5 * math.sqrt(4.4 * (math.pi**2 / 6) ** 2 / count)
