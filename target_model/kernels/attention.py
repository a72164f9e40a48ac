"""Attention over a paged cache: one kernel for dense layers, chosen blocks and unions of chosen blocks; causal rows and
trees.

    out[t, q] = sum_s softmax_s(scale * q[t, q] . k[s, q // G]) v[s, q // G]   over the keys s that row t sees (and,
    sparse, has chosen)

T rows, R sequences, Q = K * G query heads, K kv heads, G group size (1..16, a power of two), D head dim (32, 64, 128),
P pages, B slots in a page (16..128, a power of two), N chosen blocks. A program covers BLOCK_T rows x G heads of one kv
head as the M rows of its dots, and one split of the keys; with several splits `combine_kernel` joins the fp32 partials.
Where keys come from (MODE):
    "dense"   pages 0, 1, 2, ... of the sequence
    "chosen"  the row's own list [T, K, N] (BLOCK_T = 1)
    "union"   a list for each tile of BLOCK_T rows, with one bit a row (chosen_lists.py)
Trees: keys in slots below committed[r] as above, then one tile of 64 scratch slots, each visible by its bit in
ancestors[t]; with SCRATCH_CHOSEN (sparse) only if the row chose block position // B of that scratch row. Unwritten
slots may hold NaN: values are loaded under a mask. Not supported: group sizes that are no power of two, head dims
beyond 128, more than 64 scratch slots.
"""

import triton
import triton.language as tl

from target_model.kernels.common import softmax_step, to_dot, widen


@triton.jit
def page_tile(k_pool, v_pool, q, page, first, limit, head, MASKED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
              PAGE: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Scores [M, BLOCK_N] and values [BLOCK_N, D] of slots first.. of a page; MASKED: values at or behind `limit` (in
    the page) read as 0."""
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    at = (page.to(tl.int64) * PAGE * HEADS + head) * D + n[:, None] * (HEADS * D) + d[None, :]
    if MASKED:
        k = tl.load(k_pool + at, mask=n[:, None] < limit, other=0.0)
        v = tl.load(v_pool + at, mask=n[:, None] < limit, other=0.0)
    else:
        k = tl.load(k_pool + at)
        v = tl.load(v_pool + at)
    scores = tl.dot(q, tl.trans(to_dot(k, q, UPCAST)), input_precision="ieee")
    return scores, to_dot(v, q, UPCAST)


@triton.jit
def scratch_tile(k_pool, v_pool, q, bits, choice, position, block_table, committed, row, row_ok, start, count, head,
J: tl.constexpr,
                 N: tl.constexpr, SPARSE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
                 UPCAST: tl.constexpr):  # fmt: skip
    """Scores [M, 64] (-inf where invisible) and values [64, D] of the scratch slots of one sequence for rows `row` [M]
    of the batch."""
    s = tl.arange(0, 64)
    d = tl.arange(0, D)
    seen = ((bits[:, None] >> s[None, :].to(tl.int64)) & 1) != 0
    if SPARSE:
        block = tl.load(position + start + s, mask=s < count, other=-1).to(tl.int32) // PAGE
        chosen = tl.zeros_like(seen)
        for i in tl.static_range(N):
            mine = tl.load(choice + (row * J + head) * N + i, mask=row_ok, other=-1)
            chosen = chosen | (mine[:, None] == block[None, :])
        seen = seen & chosen & (s < count)[None, :]
    used = tl.max(seen.to(tl.int32), 0) > 0
    slot = committed + s
    page = tl.load(block_table + slot // PAGE, mask=used, other=0).to(tl.int64)
    at = ((page * PAGE + slot % PAGE) * HEADS + head)[:, None] * D + d[None, :]
    k = to_dot(tl.load(k_pool + at, mask=used[:, None], other=0.0), q, UPCAST)
    v = to_dot(tl.load(v_pool + at, mask=used[:, None], other=0.0), q, UPCAST)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    return tl.where(seen, scores, float("-inf")), v


@triton.jit
def attention_kernel(
    q,  # [T, Q, D], row stride q_stride, heads adjacent
    k_pool,  # [P, B, K, D]
    v_pool,  # [P, B, K, D]
    out,  # [T, Q, D]
    partial,  # fp32 [SPLITS, T, Q, D], used with SPLITS > 1
    lse,  # fp32 [SPLITS, T, Q]: log2 of the sum of exponentials
    row_start,  # int32 [R + 1]
    committed,  # int32 [R]
    slots,  # int64 [T]
    position,  # int64 [T]
    block_table,  # int32 [R, table_width]
    ancestors,  # int64 [T], read with TREE
    choice,  # int32 [T, K, N], read in the sparse modes
    union,  # int32 [tiles, K, list_width] block ids, ascending; tile i of sequence r is row_start[r] // BLOCK_T + r + i
    union_pages,  # int32, same shape: their pages
    union_rows,  # int32, same shape: bit i set = row i of the tile chose the block
    union_count,  # int32 [tiles, K]
    part_stride,  # T * Q
    q_stride,
    table_width,
    list_width,
    first_slot,
    scale,  # softmax scale * log2(e)
    MODE: tl.constexpr,
    TREE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    FIRST: tl.constexpr,
    SCRATCH_CHOSEN: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(0) % SPLITS
    head = (tl.program_id(0) // SPLITS) % HEADS
    tile = tl.program_id(0) // (SPLITS * HEADS)
    if MODE == "dense" and not TREE:
        tile = tl.num_programs(0) // (SPLITS * HEADS) - 1 - tile  # the longest first: no long one runs on alone
    r = tl.program_id(1)
    start = tl.load(row_start + r)
    count = tl.load(row_start + r + 1) - start
    if tile * BLOCK_T >= count:
        return
    known = tl.load(committed + r)
    table = block_table + r.to(tl.int64) * table_width

    m = tl.arange(0, BLOCK_M)
    local = tile * BLOCK_T + m // GROUP
    row_ok = (m < BLOCK_T * GROUP) & (local < count)
    row = (start + local).to(tl.int64)
    q_head = head * GROUP + m % GROUP
    d = tl.arange(0, D)
    q_tile = tl.load(q + row[:, None] * q_stride + q_head[:, None] * D + d[None, :], mask=row_ok[:, None], other=0.0)
    q_tile = widen(q_tile, UPCAST)

    if TREE:
        limit = tl.where(row_ok, known, 0)
        highest = known
        lowest = known
    else:
        limit = tl.load(slots + row, mask=row_ok, other=-1).to(tl.int32) + 1
        highest = tl.max(limit, 0)
        lowest = tl.min(tl.where(row_ok, limit, highest), 0)

    STEPS: tl.constexpr = PAGE // BLOCK_N
    list_at = ((start // BLOCK_T + r + tile) * HEADS + head).to(tl.int64) * list_width
    if MODE == "dense":
        total = tl.cdiv(highest, BLOCK_N)
        full = lowest // BLOCK_N
    elif MODE == "chosen":
        list_at = ((start + tile).to(tl.int64) * HEADS + head) * N
        n = tl.arange(0, triton.next_power_of_2(N))
        ids = tl.load(choice + list_at + n, mask=n < N, other=-1)
        total = tl.sum(((ids >= 0) & (ids * PAGE < highest)).to(tl.int32), 0) * STEPS
        full = 0  # memory-bound: one masked loop
    else:
        total = tl.load(union_count + (start // BLOCK_T + r + tile) * HEADS + head) * STEPS
        full = total
        if total > 0:
            last = tl.load(union + list_at + total // STEPS - 1)
            before = tl.load(union + list_at + tl.maximum(total // STEPS - 2, 0))
            cut = ((last + 1) * PAGE > lowest).to(tl.int32) + (((before + 1) * PAGE > lowest) & (before < last)).to(
                tl.int32
            )
            full = total - cut * STEPS
    if FIRST:
        full = 0
    share = tl.cdiv(total, SPLITS)
    low = split * share
    high = tl.minimum(low + share, total)
    middle = tl.maximum(tl.minimum(high, full), low)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)

    for i in range(low, middle):
        block = i // STEPS
        row_on = row_ok
        if MODE == "union":
            members = tl.load(union_rows + list_at + i // STEPS)
            block = tl.load(union + list_at + i // STEPS)
            row_on = row_ok & (((members >> (m // GROUP)) & 1) != 0)
        page = tl.load(table + block)
        scores, v = page_tile(
            k_pool, v_pool, q_tile, page, (i % STEPS) * BLOCK_N, PAGE, head, False, HEADS, D, PAGE, BLOCK_N, UPCAST
        )
        row_max, row_sum, acc = softmax_step(scores, v, row_max, row_sum, acc, row_on, scale, UPCAST)

    for i in range(middle, high):
        block = i // STEPS
        row_on = row_ok
        if MODE == "union":
            members = tl.load(union_rows + list_at + i // STEPS)
            block = tl.load(union + list_at + i // STEPS)
            row_on = row_ok & (((members >> (m // GROUP)) & 1) != 0)
        elif MODE == "chosen":
            block = tl.load(choice + list_at + i // STEPS)
        page = tl.load(table + block)
        first = (i % STEPS) * BLOCK_N
        scores, v = page_tile(
            k_pool, v_pool, q_tile, page, first, highest - block * PAGE, head, True, HEADS, D, PAGE, BLOCK_N, UPCAST
        )
        key = block * PAGE + first + tl.arange(0, BLOCK_N)
        seen = key[None, :] < limit[:, None]
        if FIRST:
            seen = seen & (key >= first_slot)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        row_max, row_sum, acc = softmax_step(scores, v, row_max, row_sum, acc, row_on, scale, UPCAST)

    if TREE:
        if split == SPLITS - 1:
            bits = tl.load(ancestors + row, mask=row_ok, other=0)
            scores, v = scratch_tile(k_pool, v_pool, q_tile, bits, choice, position, table, known, row, row_ok, start,
            count, head, HEADS, N,
                                     SCRATCH_CHOSEN, HEADS, D, PAGE, UPCAST)  # fmt: skip
            row_max, row_sum, acc = softmax_step(scores, v, row_max, row_sum, acc, row_ok, scale, UPCAST)

    at = row * (HEADS * GROUP) + q_head
    result = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    log_sum = tl.where(row_sum > 0, row_max + tl.log2(tl.where(row_sum > 0, row_sum, 1.0)), float("-inf"))
    if SPLITS > 1:
        part = split.to(tl.int64) * part_stride + at
        tl.store(lse + part, log_sum, mask=row_ok)
        tl.store(partial + part[:, None] * D + d[None, :], result.to(partial.dtype.element_ty), mask=row_ok[:, None])
    else:
        tl.store(lse + at, log_sum, mask=row_ok)
        tl.store(out + at[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=row_ok[:, None])


@triton.jit
def combine_kernel(
    partial,  # fp32 [S, T * Q, D]
    lse,  # fp32 [S, T * Q]: log2 of each part's sum; -inf: the part is empty and not read
    out,  # [T * Q, D]
    joined,  # fp32 [T * Q] log2 of the whole sum
    rows,  # T * Q
    parts,  # S
    D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    r = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    s = tl.arange(0, PARTS).to(tl.int64)
    d = tl.arange(0, D)
    ok = (r < rows)[:, None] & (s < parts)[None, :]
    part = s[None, :] * rows + r[:, None]
    log_sum = tl.load(lse + part, mask=ok, other=float("-inf"))
    top = tl.max(log_sum, 1)
    base = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(tl.exp2(log_sum - base[:, None]), 1)
    total = tl.where(total > 0, total, 1.0)
    result = tl.zeros([BLOCK_R, D], tl.float32)
    for i in tl.static_range(PARTS):
        at = r + i * rows.to(tl.int64)
        one = tl.load(lse + at, mask=(r < rows) & (r * 0 + i < parts), other=float("-inf"))
        x = tl.load(partial + at[:, None] * D + d[None, :], mask=(one > float("-inf"))[:, None], other=0.0)
        result += x.to(tl.float32) * tl.exp2(one - base)[:, None]
    result = result / total[:, None]
    tl.store(out + r[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=(r < rows)[:, None])
    tl.store(joined + r, base + tl.log2(total), mask=r < rows)
