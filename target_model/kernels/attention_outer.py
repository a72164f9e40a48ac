"""Block-sparse attention of trees with the cache outside: a program loads one block of K and V once, for all nodes that chose it.

A program covers (block, kv head, sequence): it gathers the rows that chose the block, BLOCK_T at a time (x G heads = the M rows of a full
matrix tile), and writes each row's normalised partial result and log2-sum for that block; `combine_kernel` joins the N parts of a row with
the part of the scratch slots (part N, `attention_kernel` in mode "scratch"). K and V of a block are read once for each sequence, however
many nodes chose it, and no product is wasted on rows that did not. Shapes as in attention.py; at most 64 rows a sequence.
"""

import triton
import triton.language as tl

from target_model.kernels.common import to_dot, widen


@triton.jit
def outer_kernel(
    q,  # [T, Q, D], row stride q_stride, heads adjacent
    k_pool,  # [P, B, K, D]
    v_pool,  # [P, B, K, D]
    partial,  # [T * Q, N + 1, D]
    lse,  # fp32 [T * Q, N + 1]
    row_start,  # int32 [R + 1]
    committed,  # int32 [R]
    block_table,  # int32 [R, table_width]
    choice,  # int32 [T, K, N]
    mask,  # int64 [R, K, blocks], from mask_kernel
    blocks,
    q_stride,
    table_width,
    scale,  # softmax scale * log2(e)
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    r = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    word = tl.load(mask + tl.program_id(1).to(tl.int64) * blocks + block)
    if word == 0:
        return
    start = tl.load(row_start + r)
    known = tl.load(committed + r)
    page = tl.load(block_table + r.to(tl.int64) * table_width + block).to(tl.int64)
    n = tl.arange(0, PAGE)
    d = tl.arange(0, D)
    seen = block * PAGE + n < known
    at = (page * PAGE * HEADS + head) * D + n[:, None] * (HEADS * D) + d[None, :]
    k = tl.load(k_pool + at, mask=seen[:, None], other=0.0)
    v = tl.load(v_pool + at, mask=seen[:, None], other=0.0)

    node = tl.arange(0, 64)
    member = ((word >> node.to(tl.int64)) & 1).to(tl.int32)
    rank = tl.cumsum(member, 0) - 1
    total = tl.sum(member, 0)
    m = tl.arange(0, BLOCK_M)
    i = tl.arange(0, N_PAD)
    for first in range(0, total, BLOCK_T):
        wanted = first + m // GROUP
        row_ok = (m < BLOCK_T * GROUP) & (wanted < total)
        mine = tl.sum(tl.where((rank[None, :] == wanted[:, None]) & (member != 0)[None, :], node[None, :], 0), 1)
        row = (start + mine).to(tl.int64)
        q_head = head * GROUP + m % GROUP
        q_tile = tl.load(
            q + row[:, None] * q_stride + q_head[:, None] * D + d[None, :], mask=row_ok[:, None], other=0.0
        )
        q_tile = widen(q_tile, UPCAST)
        ids = tl.load(
            choice + ((row * HEADS + head) * N)[:, None] + i[None, :], mask=row_ok[:, None] & (i < N)[None, :], other=-1
        )
        part = tl.sum(tl.where(ids == block, i[None, :], 0), 1)
        scores = tl.dot(q_tile, tl.trans(to_dot(k, q_tile, UPCAST)), input_precision="ieee")
        scores = tl.where(seen[None, :], scores * scale, float("-inf"))
        top = tl.max(scores, 1)
        p = tl.exp2(scores - top[:, None])
        row_sum = tl.sum(p, 1)
        values = to_dot(v, q_tile, UPCAST)
        result = tl.dot(p.to(values.dtype), values, input_precision="ieee") / row_sum[:, None]
        to = (row * (HEADS * GROUP) + q_head) * (N + 1) + part
        tl.store(lse + to, top + tl.log2(row_sum), mask=row_ok)
        tl.store(partial + to[:, None] * D + d[None, :], result.to(partial.dtype.element_ty), mask=row_ok[:, None])
