"""MSA's choice of blocks: index scores of every block, then the best N.

    score[t, j, b] = max over the keys s of block b that row t sees of iq[t, j] . ik[s]

T rows, R sequences, J index heads (one index-K head is shared by all), D index dim, P pages, B slots in a page = tokens
in a block, N chosen blocks. Three kernels:
    few_scores_kernel   up to 64 (row, head) columns, K as the first operand (decode, small trees): memory-bound, pages
                        split over programs
    many_scores_kernel  tiles of BLOCK_T rows x J heads against one page, so that a page is read once for all heads
                        (prefill, trees)
    choose_kernel       one warp for a (row, head): forces init and local blocks, picks the N best, ties to the lower
                        id, ascending (threshold by bisection on the scores' bits, then two prefix sums: no sort)
Trees: committed keys as above; the at most 64 scratch keys belong to block position // B and are scored by
scratch_scores_kernel into a list of SPAN blocks from block committed // B on, which choose_kernel merges. No scale: it
does not change the order. Not supported: J no power of two, D outside 32, 64, 128.
"""

import triton
import triton.language as tl

from target_model.kernels.common import to_dot, widen


@triton.jit
def column_rows(tile, start, count, J: tl.constexpr, BLOCK_C: tl.constexpr):
    """Row of the batch and index head of each of a tile's BLOCK_C (row, head) pairs, and whether the pair exists."""
    c = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    return (start + c // J).to(tl.int64), c % J, c // J < count


@triton.jit
def few_scores_kernel(
    iq,  # [T, J, D], row stride q_stride, heads adjacent
    pool,  # [P, B, D]
    scores,  # fp32 [T, J, blocks]
    row_start,  # int32 [R + 1]
    committed,  # int32 [R]
    slots,  # int64 [T]
    block_table,  # int32 [R, table_width]
    q_stride,
    table_width,
    blocks,
    TREE: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    r = tl.program_id(1)
    start = tl.load(row_start + r)
    count = tl.load(row_start + r + 1) - start
    if tl.program_id(2) * BLOCK_C >= count * J:
        return
    row, j, ok = column_rows(tl.program_id(2), start, count, J, BLOCK_C)
    if TREE:
        limit = tl.zeros([BLOCK_C], tl.int32) + tl.load(committed + r)
    else:
        limit = tl.load(slots + row, mask=ok, other=-1).to(tl.int32) + 1
    highest = tl.max(limit, 0)
    low = tl.program_id(0) * PAGES
    high = tl.minimum(low + PAGES, tl.cdiv(highest, PAGE))
    if low >= high:
        return
    n = tl.arange(0, PAGE)
    d = tl.arange(0, D)
    q = tl.load(iq + (row * q_stride + j * D)[:, None] + d[None, :], mask=ok[:, None], other=0.0)
    q = tl.trans(widen(q, UPCAST))
    to = scores + (row * J + j) * blocks
    for b in range(low, high):
        page = tl.load(block_table + r.to(tl.int64) * table_width + b).to(tl.int64)
        k = tl.load(pool + (page * PAGE + n)[:, None] * D + d[None, :])
        dots = tl.dot(to_dot(k, q, UPCAST), q, input_precision="ieee")
        dots = tl.where((b * PAGE + n)[:, None] < limit[None, :], dots, float("-inf"))
        tl.store(to + b, tl.max(dots, 0), mask=ok & (b * PAGE < limit))


@triton.jit
def many_scores_kernel(
    iq,  # [T, J, D], row stride q_stride, heads adjacent
    pool,  # [P, B, D]
    scores,  # fp32 [T, J, blocks]
    row_start,  # int32 [R + 1]
    committed,  # int32 [R]
    slots,  # int64 [T]
    block_table,  # int32 [R, table_width]
    q_stride,
    table_width,
    blocks,
    TREE: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    r = tl.program_id(1)
    split = tl.program_id(0) % SPLITS
    tile = tl.num_programs(0) // SPLITS - 1 - tl.program_id(0) // SPLITS  # the longest first
    start = tl.load(row_start + r)
    count = tl.load(row_start + r + 1) - start
    if tile * BLOCK_C >= count * J:
        return
    row, j, ok = column_rows(tile, start, count, J, BLOCK_C)
    if TREE:
        limit = tl.zeros([BLOCK_C], tl.int32) + tl.load(committed + r)
    else:
        limit = tl.load(slots + row, mask=ok, other=-1).to(tl.int32) + 1
    highest = tl.max(limit, 0)
    lowest = tl.min(tl.where(ok, limit, highest), 0)
    total = tl.cdiv(highest, PAGE)
    share = tl.cdiv(total, SPLITS)
    low = split * share
    high = tl.minimum(low + share, total)
    middle = tl.maximum(tl.minimum(high, lowest // PAGE), low)
    n = tl.arange(0, PAGE)
    d = tl.arange(0, D)
    q = tl.load(iq + (row * q_stride + j * D)[:, None] + d[None, :], mask=ok[:, None], other=0.0)
    q = widen(q, UPCAST)
    to = scores + (row * J + j) * blocks
    table = block_table + r.to(tl.int64) * table_width
    for b in range(low, middle):
        page = tl.load(table + b).to(tl.int64)
        k = tl.load(pool + (page * PAGE + n)[:, None] * D + d[None, :])
        dots = tl.dot(q, tl.trans(to_dot(k, q, UPCAST)), input_precision="ieee")
        tl.store(to + b, tl.max(dots, 1), mask=ok)
    for b in range(middle, high):
        page = tl.load(table + b).to(tl.int64)
        k = tl.load(pool + (page * PAGE + n)[:, None] * D + d[None, :])
        dots = tl.dot(q, tl.trans(to_dot(k, q, UPCAST)), input_precision="ieee")
        dots = tl.where((b * PAGE + n)[None, :] < limit[:, None], dots, float("-inf"))
        tl.store(to + b, tl.max(dots, 1), mask=ok & (b * PAGE < limit))


@triton.jit
def scratch_scores_kernel(
    iq,  # [T, J, D], row stride q_stride, heads adjacent
    pool,  # [P, B, D]
    scores,  # fp32 [T, J, SPAN]: blocks committed // B, + 1, ...
    row_start,  # int32 [R + 1]
    committed,  # int32 [R]
    position,  # int64 [T]
    ancestors,  # int64 [T]
    block_table,  # int32 [R, table_width]
    q_stride,
    table_width,
    J: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPAN: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    r = tl.program_id(1)
    start = tl.load(row_start + r)
    count = tl.load(row_start + r + 1) - start
    if tl.program_id(0) * BLOCK_C >= count * J:
        return
    row, j, ok = column_rows(tl.program_id(0), start, count, J, BLOCK_C)
    known = tl.load(committed + r)
    s = tl.arange(0, 64)
    d = tl.arange(0, D)
    q = tl.load(iq + (row * q_stride + j * D)[:, None] + d[None, :], mask=ok[:, None], other=0.0)
    q = widen(q, UPCAST)
    slot = known + s
    page = tl.load(block_table + r.to(tl.int64) * table_width + slot // PAGE, mask=s < count, other=0).to(tl.int64)
    k = tl.load(pool + (page * PAGE + slot % PAGE)[:, None] * D + d[None, :], mask=(s < count)[:, None], other=0.0)
    dots = tl.dot(q, tl.trans(to_dot(k, q, UPCAST)), input_precision="ieee")
    bits = tl.load(ancestors + row, mask=ok, other=0)
    seen = (((bits[:, None] >> s[None, :].to(tl.int64)) & 1) != 0) & (s < count)[None, :]
    offset = tl.load(position + start + s, mask=s < count, other=0).to(tl.int32) // PAGE - known // PAGE
    for i in tl.static_range(SPAN):
        best = tl.max(tl.where(seen & (offset == i)[None, :], dots, float("-inf")), 1)
        tl.store(scores + (row * J + j) * SPAN + i, best, mask=ok)


@triton.jit
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
    SPAN: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64)
    row = at // J
    own = tl.load(position + row).to(tl.int32) // PAGE
    b = tl.arange(0, BLOCKS)
    if own < N:
        n = tl.arange(0, triton.next_power_of_2(N))
        tl.store(chosen + at * N + n, tl.where(n <= own, n, -1), mask=n < N)
        return
    if TREE:
        r = tl.arange(0, SEQUENCES)
        ends = tl.load(row_start + r + 1, mask=r < sequences, other=0x7FFFFFFF)
        known = tl.load(committed + tl.sum((ends <= row).to(tl.int32), 0))
        x = tl.load(scores + at * blocks + b, mask=b * PAGE < known, other=float("-inf"))
        i = b - known // PAGE
        x = tl.maximum(x, tl.load(scratch + at * SPAN + i, mask=(i >= 0) & (i < SPAN), other=float("-inf")))
    else:
        x = tl.load(scores + at * blocks + b, mask=b <= own, other=float("-inf"))
    forced = ((b > own - local_blocks) | (b < init_blocks)) & (b <= own)
    x = tl.where(forced, float("-inf"), tl.where(x == 0.0, 0.0, x))  # one zero: -0.0 equals 0.0
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    need = N - tl.sum(forced.to(tl.int32), 0)

    # The largest `low` with at least `need` keys at or above it, by bisection; most often a gap with exactly `need`
    # ends it early.
    low = tl.min(tl.where(x > float("-inf"), key, 0x7FFFFFFF), 0)
    if BLOCKS >= 64:
        best = tl.max(
            tl.reshape(key, [32, BLOCKS // 32]), 1
        )  # of 32 groups: each that is not empty holds one key at or above
        full = best > -0x7F800001  # the key of -inf
        closer = tl.min(tl.where(full, best, 0x7FFFFFFF), 0)
        low = tl.where(tl.sum(full.to(tl.int32), 0) >= need, closer, low)
    high = tl.max(key, 0) + 1
    above = 0  # keys at or above `high`
    count = tl.sum((key >= low).to(tl.int32), 0)
    while (count != need) & (high > low + 1):
        middle = (low & high) + ((low ^ high) >> 1)
        found = tl.sum((key >= middle).to(tl.int32), 0)
        if found >= need:
            low = middle
            count = found
        else:
            high = middle
            above = found
    level = (key >= low) & (key < high)
    rank = tl.cumsum(level.to(tl.int32), 0)
    taken = (forced | (key >= high) | (level & (rank <= need - above))).to(tl.int32)
    place = tl.cumsum(taken, 0) - 1
    tl.store(chosen + at * N + place, b, mask=taken != 0)
