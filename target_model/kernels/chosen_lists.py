"""Turns the rows' choices into work lists: the union of the blocks that a tile of rows chose.

choice [T, K, N] block ids, ascending, -1 behind. T rows, R sequences, K kv heads, N chosen blocks. For a tile of
BLOCK_T rows: its distinct blocks, ascending, one bit for each row that chose the block, and their number. No sort:
ranks come from a table of comparisons.
Trees: blocks without a committed key are left out (their keys are scratch slots, which are attended separately).
"""

import triton
import triton.language as tl

from target_model.kernels.common import begin, sequence_rows


@triton.jit
def union_kernel(
    choice,  # int32 [T, K, N]
    row_start,  # int32 [R + 1]
    committed,  # int32 [R], read with TREE
    union,  # int32 [tiles, K, BLOCK_T * N]; tile i of sequence r is row_start[r] // BLOCK_T + r + i
    union_rows,  # int32, same shape
    union_count,  # int32 [tiles, K]
    TREE: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    tile = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    r = tl.program_id(1)
    start, count = sequence_rows(row_start, r, False)
    if tile * BLOCK_T >= count:
        return
    e = tl.arange(0, BLOCK_T * N_PAD)
    row = e // N_PAD
    n = e % N_PAD
    at = ((start + tile * BLOCK_T + row).to(tl.int64) * HEADS + head) * N + n
    ids = tl.load(choice + at, mask=(n < N) & (tile * BLOCK_T + row < count), other=-1)
    ok = ids >= 0
    if TREE:
        ok = ok & (ids * PAGE < tl.load(committed + r))
    ids = tl.where(ok, ids, 0x7FFFFFFF)
    same = (ids[:, None] == ids[None, :]) & ok[None, :]
    members = tl.sum(tl.where(same, (1 << row)[None, :], 0), 1)
    first = ok & (tl.min(tl.where(same, row[None, :], BLOCK_T), 1) == row)
    rank = tl.sum((first[None, :] & (ids[None, :] < ids[:, None])).to(tl.int32), 1)
    list_at = (start // BLOCK_T + r + tile) * HEADS + head
    to = list_at.to(tl.int64) * (BLOCK_T * N) + rank
    tl.store(union + to, ids, mask=first)
    tl.store(union_rows + to, members, mask=first)
    tl.store(union_count + list_at, tl.sum(first.to(tl.int32), 0))
