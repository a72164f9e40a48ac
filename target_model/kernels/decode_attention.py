"""Attention of single rows over their chosen blocks: decoding, and trees of few rows.

T rows, R sequences, Q = K * G query heads, K kv heads, G group size, D head dim, P pages, B slots in a page, N chosen
blocks. A program takes TILES of the N * B / BLOCK_N key tiles of one row and kv head: the G heads are the M rows of its
dots. In trees the last part takes the scratch slots, too. Several parts of a row are joined by
    LAST   the program of a (row, kv head) that arrives last, told by a counter, or
    else   `combine_kernel`: faster for many parts of few rows, as one program reads them no faster than 60 GB/s.
The page ids of a program are loaded before its loop and picked out of registers in it: loads of K and V that wait for a
load of the same loop do not run ahead.
"""

import triton
import triton.language as tl

from target_model.kernels.attention import scratch_tile, store_result
from target_model.kernels.common import begin, sequence_rows, softmax_start, softmax_step, to_dot, widen


@triton.jit
def join_parts(partial, lse, out, joined, pair, PARTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr):
    """Joins the partial results of a (row, kv head) pair, which other programs wrote: past the L1 cache."""
    g = tl.arange(0, GROUP)
    s = tl.arange(0, triton.next_power_of_2(PARTS))
    d = tl.arange(0, D)
    logs = tl.load(
        lse + (pair * PARTS + s)[:, None] * GROUP + g[None, :],
        mask=(s < PARTS)[:, None],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    top = tl.max(logs, 0)
    base = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(tl.exp2(logs - base[None, :]), 0)
    total = tl.where(total > 0, total, 1.0)
    acc = tl.zeros([GROUP, D], tl.float32)
    for part in tl.static_range(PARTS):
        at = (pair * PARTS + part) * GROUP + g
        one = tl.load(lse + at, cache_modifier=".cg")
        values = tl.load(partial + at[:, None] * D + d[None, :], cache_modifier=".cg")
        acc += values.to(tl.float32) * tl.exp2(one - base)[:, None]
    acc = acc / total[:, None]
    at = pair * GROUP + g
    tl.store(out + at[:, None] * D + d[None, :], acc.to(out.dtype.element_ty))
    tl.store(joined + at, base + tl.log2(total))


@triton.jit
def store_part(
    out, joined, partial, lse, counters, pair, part, part_stride, row_max, row_sum, acc, row_ok, PARTS: tl.constexpr,
    LAST: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Stores one of PARTS results of a (row, kv head) pair; a single one, and with LAST the last, stores the whole."""
    m = tl.arange(0, BLOCK_M)
    if PARTS == 1:
        store_result(out, joined, pair * GROUP + m, row_max, row_sum, acc, row_ok, D)
    elif LAST:
        store_result(partial, lse, (pair * PARTS + part) * GROUP + m, row_max, row_sum, acc, row_ok, D)
        tl.debug_barrier()
        if tl.atomic_add(counters + pair, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
            join_parts(partial, lse, out, joined, pair, PARTS, GROUP, D)
            tl.store(counters + pair, 0)
    else:
        at = part.to(tl.int64) * part_stride + pair * GROUP + m
        store_result(partial, lse, at, row_max, row_sum, acc, row_ok, D)


@triton.jit
def attend_tiles(
    begin_tile, q_tile, k_pool, v_pool, table, choice, limit, first_slot, head, row_ok, scale, HEADS: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, FIRST: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Online softmax over TILES key tiles of one row's N blocks, from tile `begin_tile` on."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    row_max, row_sum, acc = softmax_start(BLOCK_M, D)
    STEPS: tl.constexpr = PAGE // BLOCK_N
    w = tl.arange(0, triton.next_power_of_2(TILES))
    tile = begin_tile + w
    ids = tl.load(choice + tile // STEPS, mask=(w < TILES) & (tile < N * STEPS), other=-1)
    pages = tl.load(table + tl.maximum(ids, 0))
    for i in tl.range(0, tl.minimum(TILES, N * STEPS - begin_tile), num_stages=STAGES):
        first = ((begin_tile + i) % STEPS) * BLOCK_N
        key = tl.sum(tl.where(w == i, ids, 0), 0) * PAGE + first + n
        page = tl.sum(tl.where(w == i, pages, 0), 0).to(tl.int64)
        seen = (key >= 0) & (key < limit)
        key_at = ((page * PAGE + first + n) * HEADS + head)[:, None] * D + d[None, :]
        k = tl.load(k_pool + key_at, mask=seen[:, None], other=0.0)
        v = tl.load(v_pool + key_at, mask=seen[:, None], other=0.0)
        if FIRST:
            seen = seen & (key >= first_slot)
        dots = tl.dot(q_tile, tl.trans(to_dot(k, q_tile, UPCAST)), input_precision="ieee")
        dots = tl.where(seen[None, :], dots, float("-inf"))
        v = to_dot(v, q_tile, UPCAST)
        row_max, row_sum, acc = softmax_step(dots, v, row_max, row_sum, acc, row_ok, scale, UPCAST)
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=["part_stride"])
def decode_kernel(
    q,  # [T, Q, D], row stride q_stride, heads adjacent
    k_pool,  # [P, B, K, D]
    v_pool,  # [P, B, K, D]
    out,  # [T, Q, D]
    partial,  # fp32, used with PARTS > 1: [T, K, PARTS, G, D] with LAST, else [PARTS, T, Q, D]
    lse,  # fp32, the same without D: log2 of the sum of exponentials
    joined,  # fp32 [T, Q]: of all parts
    counters,  # int32 [T, K], zero before and after, used with LAST
    row_start,  # int32 [R + 1], read without ONE
    committed,  # int32 [R], read with TREE
    slots,  # int64 [T], read without TREE
    position,  # int64 [T], read with TREE
    block_table,  # int32 [R, table_width]
    ancestors,  # int64 [T], read with TREE
    choice,  # int32 [T, K, N]
    part_stride,  # T * Q
    q_stride,
    table_width,
    first_slot,
    scale,  # softmax scale * log2(e)
    ONE: tl.constexpr,  # every sequence has one row
    TREE: tl.constexpr,
    LAST: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    FIRST: tl.constexpr,
    SCRATCH_CHOSEN: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS
    r = tl.program_id(1)
    start, count = sequence_rows(row_start, r, ONE)
    if not ONE:
        if tl.program_id(2) >= count:
            return
    row = (start + tl.program_id(2)).to(tl.int64)
    pair = row * HEADS + head
    table = block_table + r.to(tl.int64) * table_width
    if TREE:
        limit = tl.load(committed + r)
    else:
        limit = tl.load(slots + row).to(tl.int32) + 1
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    row_ok = m < GROUP
    q_at = row * q_stride + (head * GROUP + m)[:, None] * D + d[None, :]
    q_tile = widen(tl.load(q + q_at, mask=row_ok[:, None], other=0.0), UPCAST)
    row_max, row_sum, acc = attend_tiles(
        part * TILES, q_tile, k_pool, v_pool, table, choice + pair * N, limit, first_slot, head, row_ok, scale, HEADS,
        D, PAGE, N, TILES, BLOCK_M, BLOCK_N, STAGES, FIRST, UPCAST,
    )  # fmt: skip
    if TREE:
        if part == PARTS - 1:
            bits = tl.load(ancestors + row + m * 0)
            dots, v = scratch_tile(k_pool, v_pool, q_tile, bits, choice, position, table, limit, row + m * 0, row_ok,
                                   start, count, head, N, SCRATCH_CHOSEN, HEADS, D, PAGE, UPCAST)  # fmt: skip
            row_max, row_sum, acc = softmax_step(dots, v, row_max, row_sum, acc, row_ok, scale, UPCAST)
    store_part(out, joined, partial, lse, counters, pair, part, part_stride, row_max, row_sum, acc, row_ok, PARTS, LAST,
               GROUP, BLOCK_M, D)  # fmt: skip
