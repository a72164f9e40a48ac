"""Random numbers as pure functions of (seed, choice index, position, token id): Gumbel noise, and uniform ones.

The token at a position is the argmax of its processed log-probabilities plus this noise, so a seed gives the same text
with speculation on or off, tree or chain, alone or batched. `ops.gumbel_at` gives the noise of single tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from target_model.kernels.gumbel_ref import MASK, Words, philox, to_gumbel, to_uniform


def gumbel(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device | str
) -> Tensor:
    """Standard Gumbel noise, fp32 [N, vocab_size]: row n belongs to (seeds[n], choices[n], positions[n]).

    `positions` are those of the token to be chosen. Seeds are taken modulo 2^64.
    """
    return to_gumbel(_bits(seeds, choices, positions, vocab_size, device, stream=0))


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
    return to_uniform(_bits(seeds, choices, positions, count, device, stream=1))


def _bits(
    seeds: Sequence[int],
    choices: Sequence[int],
    positions: Sequence[int],
    count: int,
    device: torch.device | str,
    stream: int,
) -> Tensor:
    # Numpy runs these short integer operations about three times as fast as torch does on a CPU.
    on_cpu = torch.device(device).type == "cpu"

    def column(values: Sequence[int]) -> Words:
        words_N1 = np.array(values, dtype=np.int64)[:, None]
        return words_N1 if on_cpu else torch.from_numpy(words_N1).to(device)

    place = column(range((count + 3) // 4)).T
    counter = (place, column(positions), column(choices), column([stream]))
    key = (column([seed & MASK for seed in seeds]), column([(seed >> 32) & MASK for seed in seeds]))
    words = [torch.as_tensor(word) for word in philox(counter, key)]
    return torch.stack(words, dim=-1).flatten(1)[:, :count]
