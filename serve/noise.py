"""Random numbers as pure functions of (seed, choice index, position, token id): Gumbel noise, and uniform ones.

The token at a position is the argmax of its processed log-probabilities plus this noise, so a seed gives the same text
with speculation on or off, tree or chain, alone or batched. `ops.gumbel_at` gives the noise of single tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from target_model.batch import signed64
from target_model.kernels.gumbel_ref import gumbel_rows, random_bits, to_uniform


def gumbel(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device | str
) -> Tensor:
    """Standard Gumbel noise, fp32 [N, vocab_size]: row n belongs to (seeds[n], choices[n], positions[n]).

    `positions` are those of the token to be chosen. Seeds are taken modulo 2^64.
    """
    return gumbel_rows(*_keys(seeds, choices, positions, device), vocab_size)


class NoiseStream:
    """The Gumbel noise of one answer's positions: what one step draws and does not come to use, the next finds again.

    `rows` is by position, fp32 [V] each.
    """

    def __init__(self, seed: int, choice: int):
        self.seed, self.choice = seed, choice
        self.rows: dict[int, Tensor] = {}


def upcoming(
    streams: Sequence[NoiseStream], positions: Sequence[int], levels: int, vocab_size: int, device: torch.device | str
) -> Tensor:
    """Gumbel noise of positions[r] .. positions[r] + levels - 1 of each stream, fp32 [R, levels, V].

    Rows of earlier positions are dropped: positions never go back.
    """
    missing = []
    for stream, position in zip(streams, positions, strict=True):
        stream.rows = {place: row for place, row in stream.rows.items() if place >= position}
        missing += [(stream, place) for place in range(position, position + levels) if place not in stream.rows]
    if missing:
        keys = [(stream.seed, stream.choice, place) for stream, place in missing]
        for (stream, place), row in zip(missing, gumbel(*zip(*keys, strict=True), vocab_size, device), strict=True):
            stream.rows[place] = row
    rows = [s.rows[p + level] for s, p in zip(streams, positions, strict=True) for level in range(levels)]
    return torch.stack(rows).unflatten(0, (-1, levels))


def uniform(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], count: int, device: torch.device | str
) -> Tensor:
    """Uniform numbers in (0, 1), fp32 [N, count], independent of the Gumbel noise of the same position."""
    return to_uniform(random_bits(*_keys(seeds, choices, positions, device), count, stream=1))


def _keys(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], device: torch.device | str
) -> list[Tensor]:
    signed = [signed64(seed) for seed in seeds]
    return [torch.tensor(list(values), device=device) for values in (signed, choices, positions)]
