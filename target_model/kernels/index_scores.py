"""MSA's index scores.

    score[t, j, b] = max over the keys s of block b that row t sees of iq[t, j] . ik[s]

T rows, R sequences, J index heads (one index-K head is shared by all), D index dim, P pages, B slots in a page = tokens
in a block. Two kernels:
    few_scores_kernel   up to 64 (row, head) columns, K as the first operand (decode, small trees): memory-bound, PAGES
                        pages a program
    many_scores_kernel  tiles of BLOCK_C (row, head) pairs against one page, so that a page is read once for all heads
                        (prefill, trees)
Trees: committed keys as above; the at most 64 scratch keys belong to block position // B and go into a list of SPAN
blocks from block committed // B on, which choose_kernel merges: one more program a tile. No scale: it does not change
the order. Small loads that do not depend on each other come first: with a cold L2 each link of a chain costs 0.8 us.
Not supported: J no power of two, D outside 32, 64, 128.
"""

import triton
import triton.language as tl

from target_model.kernels.common import begin, ends_of_keys, sequence_rows, split_range, to_dot, widen


@triton.jit
def column_rows(tile, start, count, J: tl.constexpr, BLOCK_C: tl.constexpr):
    """Row of the batch and index head of each of a tile's BLOCK_C (row, head) pairs, and whether the pair exists."""
    c = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    return (start + c // J).to(tl.int64), c % J, c // J < count


@triton.jit
def load_columns(iq, row, j, ok, q_stride, D: tl.constexpr, UPCAST: tl.constexpr):
    """Index queries [BLOCK_C, D]."""
    at = (row * q_stride + j * D)[:, None] + tl.arange(0, D)[None, :]
    return widen(tl.load(iq + at, mask=ok[:, None], other=0.0), UPCAST)


@triton.jit
def score_pages(
    low, high, q, pool, table, to, ok, limit, MASKED: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Stores a tile's scores of pages low..high-1; MASKED: of which rows may see a part, below `limit` [BLOCK_C]."""
    n = tl.arange(0, PAGE)
    d = tl.arange(0, D)
    for b in range(low, high):
        page = tl.load(table + b).to(tl.int64)
        k = tl.load(pool + (page * PAGE + n)[:, None] * D + d[None, :])
        dots = tl.dot(q, tl.trans(to_dot(k, q, UPCAST)), input_precision="ieee")
        sees = ok
        if MASKED:
            dots = tl.where((b * PAGE + n)[None, :] < limit[:, None], dots, float("-inf"))
            sees = ok & (b * PAGE < limit)
        tl.store(to + b, tl.max(dots, 1), mask=sees)


@triton.jit
def scratch_scores(
    iq, pool, scratch, position, ancestors, table, tile, start, count, known, q_stride, J: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK_C: tl.constexpr, SPAN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Stores a tile's scores of the scratch keys of its sequence, [BLOCK_C, SPAN]."""
    row, j, ok = column_rows(tile, start, count, J, BLOCK_C)
    s = tl.arange(0, 64)
    d = tl.arange(0, D)
    q = load_columns(iq, row, j, ok, q_stride, D, UPCAST)
    slot = known + s
    page = tl.load(table + slot // PAGE, mask=s < count, other=0).to(tl.int64)
    k = tl.load(pool + (page * PAGE + slot % PAGE)[:, None] * D + d[None, :], mask=(s < count)[:, None], other=0.0)
    dots = tl.dot(q, tl.trans(to_dot(k, q, UPCAST)), input_precision="ieee")
    bits = tl.load(ancestors + row, mask=ok, other=0)
    seen = (((bits[:, None] >> s[None, :].to(tl.int64)) & 1) != 0) & (s < count)[None, :]
    offset = tl.load(position + start + s, mask=s < count, other=0).to(tl.int32) // PAGE - known // PAGE
    for i in tl.static_range(SPAN):
        best = tl.max(tl.where(seen & (offset == i)[None, :], dots, float("-inf")), 1)
        tl.store(scratch + (row * J + j) * SPAN + i, best, mask=ok)


@triton.jit
def few_scores_kernel(
    iq,  # [T, J, D], row stride q_stride, heads adjacent
    pool,  # [P, B, D]
    scores,  # fp32 [T, J, blocks]
    scratch,  # fp32 [T, J, SPAN], written with TREE
    row_start,  # int32 [R + 1], read without ONE
    committed,  # int32 [R]
    slots,  # int64 [T]
    position,  # int64 [T]
    ancestors,  # int64 [T], read with TREE
    block_table,  # int32 [R, table_width]
    q_stride,
    table_width,
    blocks,
    TREE: tl.constexpr,
    ONE: tl.constexpr,  # every sequence has one row
    J: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PAGES: tl.constexpr,
    STAGES: tl.constexpr,
    SPAN: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    r = tl.program_id(1)
    first = tl.program_id(0) * PAGES
    table = block_table + r.to(tl.int64) * table_width
    n = tl.arange(0, PAGE)
    d = tl.arange(0, D)
    w = tl.arange(0, PAGES)
    pages = tl.load(table + first + w, mask=first + w < blocks, other=0)
    start, count = sequence_rows(row_start, r, ONE)
    row, j, ok = column_rows(0, start, count, J, BLOCK_C)
    if TREE:
        highest = tl.load(committed + r)
        limit = tl.zeros([BLOCK_C], tl.int32) + highest
        if first >= blocks:
            scratch_scores(iq, pool, scratch, position, ancestors, table, 0, start, count, highest, q_stride, J, D,
                           PAGE, BLOCK_C, SPAN, UPCAST)  # fmt: skip
            return
    else:
        limit = tl.load(slots + row, mask=ok, other=-1).to(tl.int32) + 1
        highest = tl.max(limit, 0)
    if first * PAGE >= highest:
        return
    q = tl.trans(load_columns(iq, row, j, ok, q_stride, D, UPCAST))
    to = scores + (row * J + j) * blocks + first
    for i in tl.range(0, tl.minimum(PAGES, tl.cdiv(highest, PAGE) - first), num_stages=STAGES):
        page = tl.sum(tl.where(w == i, pages, 0), 0).to(tl.int64)
        k = tl.load(pool + (page * PAGE + n)[:, None] * D + d[None, :])
        dots = tl.dot(to_dot(k, q, UPCAST), q, input_precision="ieee")
        b = first + i
        dots = tl.where((b * PAGE + n)[:, None] < limit[None, :], dots, float("-inf"))
        tl.store(to + i, tl.max(dots, 0), mask=ok & (b * PAGE < limit))


@triton.jit
def many_scores_kernel(
    iq,  # [T, J, D], row stride q_stride, heads adjacent
    pool,  # [P, B, D]
    scores,  # fp32 [T, J, blocks]
    scratch,  # fp32 [T, J, SPAN], written with TREE
    row_start,  # int32 [R + 1]
    committed,  # int32 [R]
    slots,  # int64 [T]
    position,  # int64 [T]
    ancestors,  # int64 [T], read with TREE
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
    PARTS: tl.constexpr,  # SPLITS, and with TREE one more for the scratch keys
    SPAN: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    r = tl.program_id(1)
    split = tl.program_id(0) % PARTS
    tile = tl.num_programs(0) // PARTS - 1 - tl.program_id(0) // PARTS  # the longest first
    start, count = sequence_rows(row_start, r, False)
    known = tl.load(committed + r)
    table = block_table + r.to(tl.int64) * table_width
    if tile * BLOCK_C >= count * J:
        return
    if TREE:
        if split == SPLITS:
            scratch_scores(iq, pool, scratch, position, ancestors, table, tile, start, count, known, q_stride, J, D,
                           PAGE, BLOCK_C, SPAN, UPCAST)  # fmt: skip
            return
    row, j, ok = column_rows(tile, start, count, J, BLOCK_C)
    first = start + tile * (BLOCK_C // J)
    end = tl.minimum(first + BLOCK_C // J, start + count)
    lowest, highest = ends_of_keys(slots, known, first, end, TREE)
    if TREE:
        limit = tl.zeros([BLOCK_C], tl.int32) + known
    else:
        limit = tl.load(slots + row, mask=ok, other=-1).to(tl.int32) + 1
    share = tl.cdiv(blocks if TREE else tl.cdiv(highest, PAGE), SPLITS)
    low, middle, high = split_range(split, share, tl.cdiv(highest, PAGE), lowest // PAGE)
    q = load_columns(iq, row, j, ok, q_stride, D, UPCAST)
    to = scores + (row * J + j) * blocks
    score_pages(low, middle, q, pool, table, to, ok, limit, False, D, PAGE, UPCAST)
    score_pages(middle, high, q, pool, table, to, ok, limit, True, D, PAGE, UPCAST)
