"""Reference of `gumbel_at`, and the one definition of the random bits. Shapes: N rows, K ids of a row, V vocabulary.

The bits come from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11); integer
arithmetic gives the same ones on every device.
"""

import numpy as np
import torch
from torch import Tensor

Words = Tensor | np.ndarray

MASK = 0xFFFFFFFF
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
            ((product1 >> 32) & MASK) ^ c1 ^ k0,
            product1 & MASK,
            ((product0 >> 32) & MASK) ^ c3 ^ k1,
            product0 & MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & MASK, (k1 + _WEYL[1]) & MASK
    return c0, c1, c2, c3


def to_uniform(bits: Tensor) -> Tensor:
    """fp32 in (0, 1) from 32 random bits: 23 of them and a half are exact in fp32, so it is never 0 or 1."""
    return ((bits >> 9).float() + 0.5) * 2.0**-23


def to_gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, fp32, from 32 random bits."""
    return -torch.log(-torch.log(to_uniform(bits)))


def draw(word: Tensor, position: Tensor, choice: Tensor, seed: Tensor, stream: int) -> Tensor:
    """The four words of Philox of each place, int64, in a new last dimension; arguments int64, broadcast together."""
    columns = [word, position, choice, torch.full_like(choice, stream), seed]
    if not seed.is_cuda:  # numpy runs these short integer operations about three times as fast there
        columns = [column.numpy() for column in columns]
    *counter, seed = columns
    words = philox(tuple(counter), (seed & MASK, (seed >> 32) & MASK))
    return torch.stack([torch.as_tensor(word) for word in words], dim=-1)


def random_bits(seed_N: Tensor, choice_N: Tensor, position_N: Tensor, count: int, stream: int) -> Tensor:
    """32 random bits for each of the numbers 0 .. count - 1 of every row, int64 [N, count]."""
    # The nodes of a tree share positions: each row is drawn once.
    key_U3, place_N = torch.stack([seed_N, choice_N, position_N], 1).unique(dim=0, return_inverse=True)
    seed_U1, choice_U1, position_U1 = key_U3[:, :, None].unbind(1)
    word_1W = torch.arange((count + 3) // 4, device=seed_N.device)[None]
    return draw(word_1W, position_U1, choice_U1, seed_U1, stream).flatten(1)[place_N, :count]


def gumbel_rows(seed_N: Tensor, choice_N: Tensor, position_N: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise of the whole vocabulary, fp32 [N, V]."""
    return to_gumbel(random_bits(seed_N, choice_N, position_N, vocab_size, stream=0))


def for_rows(rows: int, *settings_R: Tensor) -> list[Tensor]:
    """Settings [R] that are each for rows / R consecutive rows, one a row."""
    return [setting_R.repeat_interleave(rows // len(setting_R)) for setting_R in settings_R]


def gumbel_at(seed_R: Tensor, choice_R: Tensor, position_R: Tensor, ids_NK: Tensor) -> Tensor:
    """Standard Gumbel noise of the tokens ids[n, :], fp32 [N, K]: that of `serve.noise.gumbel` in these places.

    All int64. Each of the R keys is for N / R consecutive rows. A seed holds 64 bits, a position is that of the token
    to be chosen; ids are not negative.
    """
    seed_N1, choice_N1, position_N1 = (key[:, None] for key in for_rows(len(ids_NK), seed_R, choice_R, position_R))
    words_NK4 = draw(ids_NK >> 2, position_N1, choice_N1, seed_N1, stream=0)
    return to_gumbel(words_NK4.gather(-1, (ids_NK & 3)[:, :, None])[:, :, 0])
