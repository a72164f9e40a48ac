"""The best K entries of long rows, and the rows' log sum exp, in two launches.

values[n] are x[n, :] in descending order, ids[n] their columns; ties: lower column. lse[n] = log sum_v exp(x[n, v])
N rows, V columns, S chunks of them. A program of `chunk_kernel` keeps the best K of one chunk, one of `merge_kernel`
the best K of one row's S * K. The K-th largest value comes from a bisection on the bits of the floats, between the
largest value and the smallest of the maxima of at least K groups; nothing is sorted but the last K. No K above 64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from target_model.kernels.common import FLOATS, PDL, cdiv, launch_options, power_of_two, require, require_tensor

CHUNK, MOST = 4096, 64
CHUNK_WARPS, MERGE_WARPS = 8, 8
NOTHING = tl.constexpr(-(2**31))  # key of a column outside the row: below that of -inf


@triton.jit
def ordered(x):
    """int32 keys in the order of the floats."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    """The floats of keys."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def largest_key(key, k, GROUPS: tl.constexpr):
    """The largest number that at least k of the keys reach, NOTHING if there is none."""
    best = tl.max(tl.reshape(key, [key.shape[0] // GROUPS, GROUPS]), 0)
    low, high, found = tl.where(k <= GROUPS, tl.min(best, 0), NOTHING), tl.max(best, 0) + 1, k - 1
    while (found != k) & (high > low + 1):
        middle = (low & high) + ((low ^ high) >> 1)
        count = tl.sum((key >= middle).to(tl.int32), 0)
        if count >= k:
            low, found = middle, count
        else:
            high = middle
    return low


@triton.jit
def places(key, low, K: tl.constexpr):
    """Where each key goes among the best K, K or more: not at all, given `low = largest_key(key, K)`. Keys above `low`
    come first; within both groups the order stays.
    """
    above, equal = key > low, key == low
    before = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    place = tl.where(above, (before & 0xFFFF) - 1, tl.sum(above.to(tl.int32), 0) + (before >> 16) - 1)
    return tl.where(above | equal, place, K)


@triton.jit
def sum_of_exponentials(x):
    """(maximum, sum of exp(x - maximum)); (-inf, 0) when all are -inf."""
    top = tl.max(x, 0)
    return top, tl.sum(tl.exp(x - tl.where(top > float("-inf"), top, 0.0)), 0)


@triton.jit
def chunk_kernel(
    x,  # [N, V]
    keys,  # int32 [N, S, K]
    columns,  # int32 [N, S, K]
    maxima,  # fp32 [N, S]
    sums,  # fp32 [N, S]
    V,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(x + n * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
    key = tl.where(v < V, ordered(value), NOTHING)
    to = n * tl.num_programs(1) + chunk
    top, total = sum_of_exponentials(value)
    tl.store(maxima + to, top)
    tl.store(sums + to, total)
    place = places(key, largest_key(key, K, GROUPS), K)
    tl.store(keys + to * K + place, key, mask=place < K)
    tl.store(columns + to * K + place, v, mask=place < K)


@triton.jit
def merge_kernel(
    keys,  # int32 [N, S, K]
    columns,  # int32 [N, S, K]
    maxima,  # fp32 [N, S]
    sums,  # fp32 [N, S]
    kept_keys,  # int32 [N, K]
    kept_columns,  # int32 [N, K]
    values,  # fp32 [N, K]
    ids,  # int64 [N, K]
    lse,  # fp32 [N]
    splits,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    top = tl.load(maxima + n * splits + s, mask=s < splits, other=float("-inf"))
    total = tl.load(sums + n * splits + s, mask=s < splits, other=0.0)
    highest = tl.max(top, 0)
    total = tl.sum(total * tl.exp(top - tl.where(highest > float("-inf"), highest, 0.0)), 0)
    tl.store(lse + n, highest + tl.log(total))

    i = tl.arange(0, WIDTH)
    key = tl.load(keys + n * splits * K + i, mask=i < splits * K, other=NOTHING)
    column = tl.load(columns + n * splits * K + i, mask=i < splits * K, other=0)
    # Equal values are in the order of their columns here: chunks are, and within a chunk all are on one side of its
    # border.
    place = places(key, largest_key(key, K, GROUPS), K)
    tl.store(kept_keys + n * K + place, key, mask=place < K)
    tl.store(kept_columns + n * K + place, column, mask=place < K)
    tl.debug_barrier()  # stored by other threads of this program
    j, other = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    key = tl.load(kept_keys + n * K + j, mask=j < K, other=NOTHING, cache_modifier=".cg")
    column = tl.load(kept_columns + n * K + j, mask=j < K, other=0, cache_modifier=".cg")
    other_key = tl.load(kept_keys + n * K + other, mask=other < K, other=NOTHING, cache_modifier=".cg")
    other_column = tl.load(kept_columns + n * K + other, mask=other < K, other=0, cache_modifier=".cg")
    ahead = (other_key > key) | ((other_key == key) & (other_column < column))
    rank = tl.sum((ahead & (other < K)).to(tl.int32), 1)[:, None]
    tl.store(values + n * K + rank, unordered(key), mask=j < K)
    tl.store(ids + n * K + rank, column.to(tl.int64), mask=j < K)


def top_rows(x_NV: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best k entries of every row: values fp32 [N, k], the largest first, and their columns int64 [N, k], of equal
    values the lowest first; and log sum exp of the whole row, fp32 [N].
    """
    rows, vocab = x_NV.shape
    require_tensor("x", x_NV, (None, None), FLOATS)
    require(0 < k <= min(MOST, vocab), f"k is {k}, must be from 1 to {MOST} and at most the {vocab} columns")
    groups = power_of_two(k)
    chunk = min(CHUNK, max(power_of_two(vocab), groups))
    splits = cdiv(vocab, chunk)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x_NV.device)

    keys, columns = (new(rows, splits, k, dtype=torch.int32) for _ in range(2))
    maxima, sums = new(rows, splits), new(rows, splits)
    chunk_kernel[(rows, splits)](
        x_NV,
        keys,
        columns,
        maxima,
        sums,
        vocab,
        CHUNK=chunk,
        GROUPS=groups,
        K=k,
        PDL=PDL,
        **launch_options(CHUNK_WARPS, 1),
    )
    kept_keys, kept_columns = (new(rows, k, dtype=torch.int32) for _ in range(2))
    values, ids, lse = new(rows, k), new(rows, k, dtype=torch.int64), new(rows)
    merge_kernel[(rows,)](
        keys, columns, maxima, sums, kept_keys, kept_columns, values, ids, lse, splits,
        SPLITS=power_of_two(splits), WIDTH=power_of_two(splits * k), GROUPS=groups, K=k, BLOCK=groups, PDL=PDL,
        **launch_options(MERGE_WARPS, 1),
    )  # fmt: skip
    return values, ids, lse
