"""Attention over a paged cache by tiles of rows: dense layers, unions of chosen blocks; causal rows and trees.

    out[t, q] = sum_s softmax_s(scale * q[t, q] . k[s, q // G]) v[s, q // G]   over the keys s that row t sees (and,
    sparse, has chosen)

T rows, R sequences, Q = K * G query heads, K kv heads, G group size (1..16, a power of two), D head dim (32, 64, 128),
P pages, B slots in a page (16..128, a power of two). A program covers BLOCK_T rows x G heads of one kv head as the M
rows of its dots, and one split of the keys; with several splits `combine_kernel` joins the fp32 partials.
Where keys come from:
    dense        pages 0, 1, 2, ... of the sequence
    with UNION   a list for each tile of BLOCK_T rows, with one bit a row (chosen_lists.py)
Trees: keys in slots below committed[r] as above, then one tile of 64 scratch slots, each visible by its bit in
ancestors[t]; with SCRATCH_CHOSEN only if the row chose that key's block. Unwritten slots may hold NaN: values are
loaded under a mask. Not supported: group sizes that are no power of two, head dims beyond 128, more than 64 scratch
slots.
"""

import triton
import triton.language as tl

from target_model.kernels.common import (
    begin,
    ends_of_keys,
    sequence_rows,
    softmax_start,
    softmax_step,
    split_range,
    to_dot,
    widen,
)


@triton.jit
def page_tile(
    k_pool, v_pool, q, page, first, limit, head, MASKED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
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
def scratch_tile(
    k_pool, v_pool, q, bits, choice, position, table, committed, row, row_ok, start, count, head, N: tl.constexpr,
    CHOSEN: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Scores [M, 64] (-inf where invisible) and values [64, D] of the scratch slots of one sequence for rows `row` [M]
    of the batch. With CHOSEN only keys whose block, position // B of their row, is among the N of `choice`."""
    s = tl.arange(0, 64)
    d = tl.arange(0, D)
    seen = ((bits[:, None] >> s[None, :].to(tl.int64)) & 1) != 0
    if CHOSEN:
        # The scratch keys lie in few blocks, from that of the first on.
        n = tl.arange(0, triton.next_power_of_2(N))
        mine = tl.load(choice + ((row * HEADS + head) * N)[:, None] + n[None, :],
                       mask=row_ok[:, None] & (n < N)[None, :], other=-1)  # fmt: skip
        block = tl.load(position + start + s, mask=s < count, other=-1).to(tl.int32) // PAGE
        chosen = tl.zeros_like(seen)
        for i in tl.static_range(63 // PAGE + 2):
            has = tl.max((mine == committed // PAGE + i).to(tl.int32), 1) > 0
            chosen = chosen | (has[:, None] & (block == committed // PAGE + i)[None, :])
        seen = seen & chosen & (s < count)[None, :]
    used = tl.max(seen.to(tl.int32), 0) > 0
    slot = committed + s
    page = tl.load(table + slot // PAGE, mask=used, other=0).to(tl.int64)
    at = ((page * PAGE + slot % PAGE) * HEADS + head)[:, None] * D + d[None, :]
    k = to_dot(tl.load(k_pool + at, mask=used[:, None], other=0.0), q, UPCAST)
    v = to_dot(tl.load(v_pool + at, mask=used[:, None], other=0.0), q, UPCAST)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    return tl.where(seen, scores, float("-inf")), v


@triton.jit
def store_result(out, lse, at, row_max, row_sum, acc, row_ok, D: tl.constexpr):
    """Ends an online softmax: normalised values and log2 of the sum of exponentials, rows `at` [M]."""
    some = row_sum > 0
    total = tl.where(some, row_sum, 1.0)
    tl.store(lse + at, tl.where(some, row_max + tl.log2(total), float("-inf")), mask=row_ok)
    to = out + at[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=row_ok[:, None])


@triton.jit
def key_tiles(
    union, union_count, list_at, lowest, highest, UNION: tl.constexpr, FIRST: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Key tiles of a tile of rows, and how many of them from the front all its rows see whole: those below `lowest`.
    Of a union the last one or two blocks may reach behind it; with FIRST the first tiles may be cut, too."""
    if UNION:
        count = tl.load(union_count)
        total = count * (PAGE // BLOCK_N)
        full = total
        if count > 0:
            last = tl.load(union + list_at + count - 1)
            before = tl.load(union + list_at + tl.maximum(count - 2, 0))
            cut = ((last + 1) * PAGE > lowest).to(tl.int32)
            cut += (((before + 1) * PAGE > lowest) & (before < last)).to(tl.int32)
            full -= cut * (PAGE // BLOCK_N)
    else:
        total = tl.cdiv(highest, BLOCK_N)
        full = lowest // BLOCK_N
    if FIRST:
        full = 0
    return total, full


@triton.jit
def attend(
    low, high, q_tile, k_pool, v_pool, table, union, union_rows, list_at, limit, highest, first_slot, head, row_ok,
    scale, row_max, row_sum, acc, MASKED: tl.constexpr, UNION: tl.constexpr, FIRST: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Online softmax over key tiles low..high-1; MASKED: of which rows may see only a part, below `limit` [M]."""
    STEPS: tl.constexpr = PAGE // BLOCK_N
    m = tl.arange(0, BLOCK_M)
    for i in range(low, high):
        block = i // STEPS
        row_on = row_ok
        if UNION:
            members = tl.load(union_rows + list_at + i // STEPS)
            block = tl.load(union + list_at + i // STEPS)
            row_on = row_ok & (((members >> (m // GROUP)) & 1) != 0)
        page = tl.load(table + block)
        first = (i % STEPS) * BLOCK_N
        scores, v = page_tile(k_pool, v_pool, q_tile, page, first, highest - block * PAGE, head, MASKED, HEADS, D,
                              PAGE, BLOCK_N, UPCAST)  # fmt: skip
        if MASKED:
            key = block * PAGE + first + tl.arange(0, BLOCK_N)
            seen = key[None, :] < limit[:, None]
            if FIRST:
                seen = seen & (key >= first_slot)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        row_max, row_sum, acc = softmax_step(scores, v, row_max, row_sum, acc, row_on, scale, UPCAST)
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=["part_stride", "table_width", "list_width", "first_slot", "splits"])
def attention_kernel(
    q,  # [T, Q, D], row stride q_stride, heads adjacent
    k_pool,  # [P, B, K, D]
    v_pool,  # [P, B, K, D]
    out,  # [T, Q, D], or with several splits fp32 [S, T, Q, D]
    lse,  # fp32 [S, T, Q]: log2 of the sum of exponentials
    row_start,  # int32 [R + 1]
    committed,  # int32 [R], used with TREE
    slots,  # int64 [T], read without TREE
    position,  # int64 [T], read with SCRATCH_CHOSEN
    block_table,  # int32 [R, table_width]
    ancestors,  # int64 [T], read with TREE
    choice,  # int32 [T, K, N], read with SCRATCH_CHOSEN
    union,  # int32 [tiles, K, list_width] block ids, ascending; tile i of sequence r is row_start[r] // BLOCK_T + r + i
    union_rows,  # int32, same shape: bit i set = row i of the tile chose the block
    union_count,  # int32 [tiles, K]
    part_stride,  # T * Q
    q_stride,
    table_width,
    list_width,
    first_slot,
    splits,
    scale,  # softmax scale * log2(e)
    UNION: tl.constexpr,
    TREE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,  # splits > 1
    FIRST: tl.constexpr,
    SCRATCH_CHOSEN: tl.constexpr,
    N: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    if not SPLIT:
        splits = 1
    split = tl.program_id(0) % splits
    head = (tl.program_id(0) // splits) % HEADS
    tile = tl.program_id(0) // (splits * HEADS)
    if not UNION and not TREE:
        tile = tl.num_programs(0) // (splits * HEADS) - 1 - tile  # the longest first: no long one runs on alone
    r = tl.program_id(1)
    start, count = sequence_rows(row_start, r, False)
    if tile * BLOCK_T >= count:
        return
    table = block_table + r.to(tl.int64) * table_width
    m = tl.arange(0, BLOCK_M)
    local = tile * BLOCK_T + m // GROUP
    row_ok = (m < BLOCK_T * GROUP) & (local < count)
    row = (start + local).to(tl.int64)
    q_head = head * GROUP + m % GROUP
    q_at = row[:, None] * q_stride + q_head[:, None] * D + tl.arange(0, D)[None, :]
    q_tile = widen(tl.load(q + q_at, mask=row_ok[:, None], other=0.0), UPCAST)
    known = tl.load(committed + r)
    first = start + tile * BLOCK_T
    end = tl.minimum(first + BLOCK_T, start + count)
    lowest, highest = ends_of_keys(slots, known, first, end, TREE)
    if TREE:
        limit = tl.where(row_ok, known, 0)
    else:
        limit = tl.load(slots + row, mask=row_ok, other=-1).to(tl.int32) + 1

    at_tile = (start // BLOCK_T + r + tile) * HEADS + head
    list_at = at_tile.to(tl.int64) * list_width
    total, full = key_tiles(union, union_count + at_tile, list_at, lowest, highest, UNION, FIRST, PAGE, BLOCK_N)
    low, middle, high = split_range(split, tl.cdiv(total, splits), total, full)

    row_max, row_sum, acc = softmax_start(BLOCK_M, D)
    row_max, row_sum, acc = attend(
        low, middle, q_tile, k_pool, v_pool, table, union, union_rows, list_at, limit, highest, first_slot, head,
        row_ok, scale, row_max, row_sum, acc, False, UNION, FIRST, HEADS, GROUP, D, PAGE, BLOCK_M, BLOCK_N, UPCAST,
    )  # fmt: skip
    row_max, row_sum, acc = attend(
        middle, high, q_tile, k_pool, v_pool, table, union, union_rows, list_at, limit, highest, first_slot, head,
        row_ok, scale, row_max, row_sum, acc, True, UNION, FIRST, HEADS, GROUP, D, PAGE, BLOCK_M, BLOCK_N, UPCAST,
    )  # fmt: skip
    if TREE:
        if split == splits - 1:
            bits = tl.load(ancestors + row, mask=row_ok, other=0)
            scores, v = scratch_tile(k_pool, v_pool, q_tile, bits, choice, position, table, known, row, row_ok, start,
                                     count, head, N, SCRATCH_CHOSEN, HEADS, D, PAGE, UPCAST)  # fmt: skip
            row_max, row_sum, acc = softmax_step(scores, v, row_max, row_sum, acc, row_ok, scale, UPCAST)
    at = split.to(tl.int64) * part_stride + row * (HEADS * GROUP) + q_head
    store_result(out, lse, at, row_max, row_sum, acc, row_ok, D)


@triton.jit(do_not_specialize=["rows", "parts"])
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
    begin(PDL)
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
        here = (r < rows) & (r * 0 + i < parts)
        one = tl.load(lse + at, mask=here, other=float("-inf"))
        x = tl.load(partial + at[:, None] * D + d[None, :], mask=here[:, None], other=0.0)
        # An empty part was never written: read without waiting for its sum, then dropped.
        result += tl.where((one > float("-inf"))[:, None], x * tl.exp2(one - base)[:, None], 0.0)
    result = result / total[:, None]
    tl.store(out + r[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=(r < rows)[:, None])
    tl.store(joined + r, base + tl.log2(total), mask=r < rows)
