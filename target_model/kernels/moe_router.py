"""The router of a mixture of experts, and the plan that groups its (token, expert) pairs by expert.

    s = sigmoid(x . gate^T);  experts = the N best of s + bias, ties to the lower id;  weights = s[experts] / sum *
                              scale
The gate stays in fp32: products in three TF32 pieces, which is as exact as fp32. T rows, H hidden, E experts, N experts
of a token.
    logits_kernel  [T, E] partial sums, H split over programs
    route_kernel   joins the splits, one program a row
    plan_kernel    one program an expert: its pairs in order, padded to tiles of BLOCK_M, and the expert of each tile;
                   behind these, programs that put x into the order in which packed weights are multiplied
"""

import triton
import triton.language as tl

from target_model.kernels.common import begin, widen
from target_model.kernels.moe_widen import arrange, prefetch, prefetch_rows


@triton.jit(do_not_specialize=["rows"])
def logits_kernel(
    x,  # [T, H]
    gate,  # fp32 [E, H]
    partial,  # fp32 [SPLITS, T, E]
    rows,
    H: tl.constexpr,
    E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    SHARE: tl.constexpr = ((H + BLOCK_H - 1) // BLOCK_H + SPLITS - 1) // SPLITS * BLOCK_H
    first = tl.program_id(2) * SHARE
    if PDL:
        if AHEAD:  # few rows: the gate comes to the L2 while the kernel before this one ends
            share_at = gate + tl.minimum(e, E - 1) * H + tl.program_id(2) * SHARE
            prefetch(share_at.to(tl.int64), SHARE * 4, BLOCK_E)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for k in range(first, tl.minimum(first + SHARE, H), BLOCK_H):
        h = k + tl.arange(0, BLOCK_H)
        at = t.to(tl.int64)[:, None] * H + h[None, :]
        a = tl.load(x + at, mask=(t < rows)[:, None] & (h < H)[None, :], other=0.0).to(tl.float32)
        b = tl.load(gate + e[:, None] * H + h[None, :], mask=(e < E)[:, None] & (h < H)[None, :], other=0.0)
        acc += tl.dot(widen(a, UPCAST), tl.trans(b), input_precision="tf32x3")
    to = partial + (tl.program_id(2).to(tl.int64) * rows + t)[:, None] * E + e[None, :]
    tl.store(to, acc, mask=(t < rows)[:, None] & (e < E)[None, :])


@triton.jit(do_not_specialize=["rows"])
def route_kernel(
    partial,  # fp32 [SPLITS, T, E]
    bias,  # fp32 [E]
    weights,  # fp32 [T, N]
    experts,  # int64 [T, N]
    rows,
    scale,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E_PAD)
    n = tl.arange(0, N_PAD)
    logits = tl.zeros([E_PAD], tl.float32)
    for split in tl.static_range(SPLITS):
        logits += tl.load(partial + (split * rows + t) * E + e, mask=e < E, other=0.0)
    score = 1.0 / (1.0 + tl.exp(-logits))
    rank = tl.where(e < E, score + tl.load(bias + e, mask=e < E, other=0.0), float("-inf"))
    chosen = tl.zeros([N_PAD], tl.int32)
    value = tl.zeros([N_PAD], tl.float32)
    for i in tl.static_range(N):
        best = tl.min(tl.where(rank == tl.max(rank, 0), e, E_PAD), 0)
        chosen = tl.where(n == i, best, chosen)
        value = tl.where(n == i, tl.sum(tl.where(e == best, score, 0.0), 0), value)
        rank = tl.where(e == best, float("-inf"), rank)
    value = value * (scale / tl.sum(value, 0))
    tl.store(weights + t * N + n, value, mask=n < N)
    tl.store(experts + t * N + n, chosen.to(tl.int64), mask=n < N)


@triton.jit
def ids_of(experts, pair, pairs, E: tl.constexpr, N: tl.constexpr, SHARED: tl.constexpr):
    """The experts of some pairs, E behind the last pair."""
    if SHARED:
        n = pair % (N + 1)
        ids = tl.load(experts + pair // (N + 1) * N + n, mask=(pair < pairs) & (n < N), other=E - 1).to(tl.int32)
        return tl.where(pair < pairs, ids, E)
    else:
        return tl.load(experts + pair, mask=pair < pairs, other=E).to(tl.int32)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def plan_kernel(
    experts,  # int64 [T, N]
    order,  # int32 [tiles * BLOCK_M] pair of each place, -1: empty
    tile_expert,  # int32 [tiles], -1: unused
    x,  # [T, H]
    arranged,  # [T, HP], see moe_widen.py; not written where PER is 1
    shared,  # int16 [SHARED_ROWS, WORDS] with AHEAD
    pairs,
    tiles,
    E: tl.constexpr,  # with SHARED one more than there are: pair N of every row is of the last one
    E_PAD: tl.constexpr,  # a power of two above E: bin E collects the padding
    N: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    H: tl.constexpr,
    HP: tl.constexpr,
    PER: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RUN: tl.constexpr,
    ARRANGED: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # The shared expert's first weight comes to the L2 while the router still works.
        if AHEAD:
            if tl.program_id(0) * 64 < SHARED_ROWS:
                prefetch_rows(shared, 0, tl.program_id(0) * 64, SHARED_ROWS, WORDS, 64)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    mine = tl.program_id(0)
    if mine >= E:
        arrange(x, arranged, mine - E, H, HP, PER, BLOCK_K, RUN, ARRANGED)
        return
    group_pairs(experts, order, tile_expert, pairs, tiles, mine, E, E_PAD, N, SHARED, BLOCK_M, CHUNK)


@triton.jit
def group_pairs(experts, order, tile_expert, pairs, tiles, mine, E: tl.constexpr, E_PAD: tl.constexpr, N: tl.constexpr,
                SHARED: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Expert `mine`: its pairs to their places, and its number to its tiles; the last expert marks unused tiles."""
    e = tl.arange(0, E_PAD)
    i = tl.arange(0, CHUNK)
    counts = tl.zeros([E_PAD], tl.int32)
    for first in range(0, pairs, CHUNK):
        ids = ids_of(experts, first + i, pairs, E, N, SHARED)
        counts += tl.histogram(ids, E_PAD)
    needed = tl.where(e < E, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    tile = tl.sum(tl.where(e < mine, needed, 0), 0)
    own = tl.sum(tl.where(e == mine, counts, 0), 0)
    own_tiles = (own + BLOCK_M - 1) // BLOCK_M
    m = tl.arange(0, BLOCK_M)
    for k in range(own_tiles):
        tl.store(tile_expert + tile + k, mine)
        empty = k * BLOCK_M + m >= own
        tl.store(order + (tile + k) * BLOCK_M + m, tl.full([BLOCK_M], -1, tl.int32), mask=empty)
    placed = tile * BLOCK_M
    for first in range(0, pairs, CHUNK):
        ids = ids_of(experts, first + i, pairs, E, N, SHARED)
        hit = (ids == mine).to(tl.int32)
        tl.store(order + placed + tl.cumsum(hit, 0) - 1, first + i, mask=hit != 0)
        placed += tl.sum(hit, 0)
    if mine == E - 1:
        for k in range(tile + own_tiles, tiles):
            tl.store(tile_expert + k, -1)
