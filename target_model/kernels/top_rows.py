"""The best K entries of long rows, and the rows' log sum exp, in two launches.

values[n] are y[n, :] in descending order, ids[n] their columns; ties: lower column. lse[n] = log sum_v exp(y[n, v])
y = x, or, noisy, x * scale[r] + gumbel(seed[r], choice[r], position[r], token of column v), as in gumbel.py
N rows, R settings, each for N / R consecutive rows, V columns, S chunks and G groups of them. A program of
`maxima_kernel` reads one chunk and keeps the maximum of every group; one of `best_kernel` reads the K groups of a row
whose maxima are the largest, and sorts the best K of their entries. No K above 64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from target_model.kernels.common import FLOATS, PDL, begin, cdiv, launch_options, power_of_two, require, require_tensor
from target_model.kernels.gumbel import noise_at, noise_tile, shared_by
from target_model.kernels.top_rows_groups import (
    GROUP,
    NOTHING,
    columns_of_groups,
    group_maxima,
    keep_best_groups,
    largest_key,
    ordered,
    places,
    sum_of_exponentials,
    unordered,
)

CHUNK, MOST = 4096, 64
MAXIMA_WARPS, BEST_WARPS = 4, 8


@triton.jit
def maxima_kernel(
    x,  # [N, V]
    scales,  # fp32 [R], read if NOISY
    seeds,  # int64 [R], read if NOISY
    choices,  # int64 [R], read if NOISY
    positions,  # int64 [R], read if NOISY
    table,  # int64 [V], tokens of the columns, read if MAPPED
    maxima,  # int32 [N, G]
    tops,  # fp32 [N, S]
    sums,  # fp32 [N, S]
    V,
    share,  # N / R
    CHUNK: tl.constexpr,
    NOISY: tl.constexpr,
    MAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    n, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(x + n * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
    if NOISY:
        r = tl.program_id(0) // share
        seed, choice, position = tl.load(seeds + r), tl.load(choices + r), tl.load(positions + r)
        if MAPPED:
            noise = noise_at(seed, choice, position, tl.load(table + v, mask=v < V, other=0).to(tl.int32))
        else:
            noise = noise_tile(seed, choice, position, chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4))
        value = value * tl.load(scales + r) + noise
    to = n * tl.num_programs(1) + chunk
    g = tl.arange(0, CHUNK // GROUP)
    key = tl.where(chunk * CHUNK + g * GROUP < V, ordered(group_maxima(value)), NOTHING)
    tl.store(maxima + to * (CHUNK // GROUP) + g, key)
    top, total = sum_of_exponentials(value)
    tl.store(tops + to, top)
    tl.store(sums + to, total)


@triton.jit
def joined_sum(tops, sums, splits, SPLITS: tl.constexpr):
    """log sum exp of a row from its chunks' maxima and sums."""
    s = tl.arange(0, SPLITS)
    top = tl.load(tops + s, mask=s < splits, other=float("-inf"))
    total = tl.load(sums + s, mask=s < splits, other=0.0)
    highest = tl.max(top, 0)
    total = tl.sum(total * tl.exp(top - tl.where(highest > float("-inf"), highest, 0.0)), 0)
    return highest + tl.log(total)


@triton.jit
def store_sorted(kept_keys, kept_columns, values, ids, K: tl.constexpr, BLOCK: tl.constexpr):
    """Values and columns in descending order; of equal ones the first kept comes first."""
    j, other = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    own = tl.load(kept_keys + j, mask=j < K, other=NOTHING, cache_modifier=".cg")
    others = tl.load(kept_keys + other, mask=other < K, other=NOTHING, cache_modifier=".cg")
    ahead = ((others > own) | ((others == own) & (other < j))) & (other < K)
    rank = tl.sum(ahead.to(tl.int32), 1)[:, None]
    tl.store(values + rank, unordered(own), mask=j < K)
    tl.store(ids + rank, tl.load(kept_columns + j, mask=j < K, cache_modifier=".cg").to(tl.int64), mask=j < K)


@triton.jit
def best_kernel(
    x,  # [N, V]
    scales,  # fp32 [R], read if NOISY
    seeds,  # int64 [R], read if NOISY
    choices,  # int64 [R], read if NOISY
    positions,  # int64 [R], read if NOISY
    table,  # int64 [V], tokens of the columns, read if MAPPED
    maxima,  # int32 [N, G]
    tops,  # fp32 [N, S]
    sums,  # fp32 [N, S]
    slots,  # int32 [N, K], which groups
    kept,  # int32 [2, N, K], keys and columns in the order of columns
    values,  # fp32 [N, K]
    ids,  # int64 [N, K]
    lse,  # fp32 [N]
    V,
    share,  # N / R
    groups,
    splits,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    NOISY: tl.constexpr,
    MAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    n = tl.program_id(0).to(tl.int64)
    keep_best_groups(maxima + n * groups, slots + n * K, groups, WIDTH, K, BLOCK)
    column = columns_of_groups(slots + n * K, K, BLOCK)
    value = tl.load(x + n * V + column, mask=column < V, other=float("-inf")).to(tl.float32)
    if NOISY:
        token = column
        if MAPPED:
            token = tl.load(table + column, mask=column < V, other=0).to(tl.int32)
        r = tl.program_id(0) // share
        noise = noise_at(tl.load(seeds + r), tl.load(choices + r), tl.load(positions + r), token)
        value = value * tl.load(scales + r) + noise
    key = tl.where(column < V, ordered(value), NOTHING)
    place = places(key, largest_key(key, K, BLOCK), K)
    kept_keys, kept_columns = kept + n * K, kept + (tl.num_programs(0) + n) * K
    tl.store(kept_keys + place, key, mask=place < K)
    tl.store(kept_columns + place, column, mask=place < K)
    tl.store(lse + n, joined_sum(tops + n * splits, sums + n * splits, splits, SPLITS))
    tl.debug_barrier()  # what is kept was stored by other threads of this program
    store_sorted(kept_keys, kept_columns, values + n * K, ids + n * K, K, BLOCK)


def top_rows(x_NV: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best k entries of every row: values fp32 [N, k], the largest first, and their columns int64 [N, k], of equal
    values the lowest first; and log sum exp of the whole row, fp32 [N].
    """
    return _run(x_NV, k, (x_NV,) * 5, 1, noisy=False, mapped=False)


def noisy_top_rows(
    x_NV: Tensor,
    k: int,
    scale_R: Tensor,
    seed_R: Tensor,
    choice_R: Tensor,
    position_R: Tensor,
    tokens_V: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`top_rows` of x * scale + the Gumbel noise (see `gumbel_at`) of the columns' tokens, by default their numbers."""
    rows, vocab = x_NV.shape
    share = shared_by(rows, scale=scale_R, seed=seed_R, choice=choice_R, position=position_R)
    if tokens_V is not None:
        require_tensor("tokens", tokens_V, (vocab,), (torch.int64,))
    noise = (scale_R, seed_R, choice_R, position_R, x_NV if tokens_V is None else tokens_V)
    return _run(x_NV, k, noise, share, noisy=True, mapped=tokens_V is not None)


def _run(
    x_NV: Tensor, k: int, noise: tuple[Tensor, ...], share: int, *, noisy: bool, mapped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocab = x_NV.shape
    require_tensor("x", x_NV, (None, None), FLOATS)
    require(0 < k <= min(MOST, vocab), f"k is {k}, must be from 1 to {MOST} and at most the {vocab} columns")

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x_NV.device)

    chunk, block = min(CHUNK, max(GROUP.value, power_of_two(vocab))), power_of_two(k)
    splits = cdiv(vocab, chunk)
    groups = splits * chunk // GROUP.value
    maxima, tops, sums = new(rows, groups, dtype=torch.int32), new(rows, splits), new(rows, splits)
    maxima_kernel[(rows, splits)](
        x_NV, *noise, maxima, tops, sums, vocab, share, CHUNK=chunk, NOISY=noisy, MAPPED=mapped, PDL=PDL,
        **launch_options(MAXIMA_WARPS, 1),
    )  # fmt: skip
    slots, kept = new(rows, k, dtype=torch.int32), new(2, rows, k, dtype=torch.int32)
    values, ids, lse = new(rows, k), new(rows, k, dtype=torch.int64), new(rows)
    best_kernel[(rows,)](
        x_NV, *noise, maxima, tops, sums, slots, kept, values, ids, lse, vocab, share, groups, splits,
        SPLITS=power_of_two(splits), WIDTH=max(block, power_of_two(groups)), K=k, BLOCK=block, NOISY=noisy,
        MAPPED=mapped, PDL=PDL, **launch_options(BEST_WARPS, 1),
    )  # fmt: skip
    return values, ids, lse
