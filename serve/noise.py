"""Random numbers as pure functions of (seed, choice index, position, token id): Gumbel noise, and uniform ones.

The token at a position is the argmax of its processed log-probabilities plus this noise, so a seed gives the same text
with speculation on or off, tree or chain, alone or batched. The bits come from Philox4x32-10 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC'11); integer arithmetic gives the same ones on every device.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Words = Tensor | np.ndarray

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Philox4x32-10: four words of 32 random bits (in int64) from a counter of four words and a key of two, broadcast
    together. Tensors or numpy arrays, all int64.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap; the low 64 bits are still right, and the mask undoes the sign of the shift.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device | str
) -> Tensor:
    """Standard Gumbel noise, fp32 [N, vocab_size]: row n belongs to (seeds[n], choices[n], positions[n]).

    `positions` are those of the token to be chosen. Seeds are taken modulo 2^64.
    """
    return -torch.log(-torch.log(_uniform(seeds, choices, positions, vocab_size, device, stream=0)))


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
    return _uniform(seeds, choices, positions, count, device, stream=1)


def _uniform(
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
    key = (column([seed & _MASK for seed in seeds]), column([(seed >> 32) & _MASK for seed in seeds]))
    words = [torch.as_tensor(word) for word in philox(counter, key)]
    bits = torch.stack(words, dim=-1).flatten(1)[:, :count]
    # 23 bits and a half are exact in fp32, so the number is never 0 or 1.
    return ((bits >> 9).float() + 0.5) * 2.0**-23
