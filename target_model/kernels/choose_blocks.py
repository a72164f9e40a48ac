"""The best N blocks of each (row, head), from the index scores: forced init and local blocks, ties to the lower id,
ascending. T rows, R sequences, J index heads, B tokens in a block, N chosen blocks.

No sort. The scores fall into GROUPS groups (block b into b % GROUPS), and the best of each are ranked by comparing all
pairs: the one of rank `need` has at least `need` scores at or above it, most often one to three more, which then go one
by one, the smallest first. Places come from one prefix sum.
"""

import triton
import triton.language as tl

from target_model.kernels.common import begin


@triton.jit
def pick(x, forced, need, BLOCKS: tl.constexpr, GROUPS: tl.constexpr):
    """Of scores x [BLOCKS], -inf where forced or hidden: 1 where forced or among the best `need`, and the place of each
    of these in ascending order. At least `need` scores are above -inf."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # one zero: -0.0 equals 0.0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    best = tl.max(tl.reshape(key, [BLOCKS // GROUPS, GROUPS]), 0)
    g = tl.arange(0, GROUPS)
    ahead = (best[None, :] > best[:, None]) | ((best[None, :] == best[:, None]) & (g[None, :] < g[:, None]))
    rank = tl.sum(ahead.to(tl.int32), 1)
    low = tl.min(tl.where(rank < need, best, 0x7FFFFFFF), 0)
    above = tl.sum((key > low).to(tl.int32), 0)
    while (above >= need) & (need > 0):
        low = tl.min(tl.where(key > low, key, 0x7FFFFFFF), 0)
        above = tl.sum((key > low).to(tl.int32), 0)
    sure = forced | ((key > low) & (need > 0))
    level = (key == low) & (need > 0)
    counts = tl.cumsum(sure.to(tl.int32) + (level.to(tl.int32) << 16), 0)  # two counts in one prefix sum
    room = need - above
    taken = (sure | (level & ((counts >> 16) <= room))).to(tl.int32)
    return taken, (counts & 0xFFFF) + tl.minimum(counts >> 16, room) - 1


@triton.jit
def forced_blocks(b, own, init_blocks, local_blocks):
    """Whether block b is visible to a row in block `own` and always chosen."""
    return ((b > own - local_blocks) | (b < init_blocks)) & (b <= own)


@triton.jit(do_not_specialize=["sequences"])
def choose_kernel(
    scores,  # fp32 [T, J, blocks]
    scratch,  # fp32 [T, J, SPAN], read with TREE
    row_start,  # int32 [R + 1], read with TREE
    committed,  # int32 [R]
    position,  # int64 [T]
    chosen,  # int32 [T, J, N]
    blocks,
    sequences,  # R
    init_blocks,
    local_blocks,
    TREE: tl.constexpr,
    J: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    at = tl.program_id(0).to(tl.int64)
    row = at // J
    b = tl.arange(0, BLOCKS)
    x = tl.load(scores + at * blocks + b, mask=b < blocks, other=float("-inf"))
    own = tl.load(position + row).to(tl.int32) // PAGE
    if TREE:
        r = tl.arange(0, SEQUENCES)
        starts = tl.load(row_start + r, mask=r < sequences, other=0x7FFFFFFF)
        ends = tl.load(row_start + r + 1, mask=r < sequences, other=0x7FFFFFFF)
        lengths = tl.load(committed + r, mask=r < sequences, other=0)
        known = tl.sum(tl.where((starts <= row) & (row < ends), lengths, 0), 0)
        i = b - known // PAGE
        other = tl.load(scratch + at * SPAN + i, mask=(i >= 0) & (i < SPAN), other=float("-inf"))
        x = tl.maximum(tl.where(b * PAGE < known, x, float("-inf")), other)
    if own < N:
        n = tl.arange(0, triton.next_power_of_2(N))
        tl.store(chosen + at * N + n, tl.where(n <= own, n, -1), mask=n < N)
        return
    forced = forced_blocks(b, own, init_blocks, local_blocks)
    x = tl.where((b <= own) & (forced == 0), x, float("-inf"))
    need = N - tl.sum(forced.to(tl.int32), 0)
    taken, place = pick(x, forced, need, BLOCKS, GROUPS)
    tl.store(chosen + at * N + place, b, mask=taken != 0)
