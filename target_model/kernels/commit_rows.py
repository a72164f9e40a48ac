"""Moves the cache rows of accepted tree nodes behind the root, in every layer, in one launch.

    pool[layer, slot committed[r] + 1 + m] = pool[layer, slot committed[r] + path[r, m]]   for path[r, m] >= 0
L layers, P pages, B slots, K kv heads, D head dim, M longest path. Source and destination overlap; a program takes
COLUMNS words of one sequence's rows in one layer of one tensor, and loads all of them before it stores any.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from target_model.batch import Batch
from target_model.kernels.common import (
    PDL,
    POOL_FLOATS,
    begin,
    cdiv,
    launch_options,
    power_of_two,
    require,
    require_tensor,
)


@triton.jit(do_not_specialize=["table_width"])
def commit_kernel(
    k,  # [L, P, B, K * D] in words
    v,  # same
    index,  # [sparse layers, P, B, D] in words
    path,  # int64 [R, M]
    committed,  # int32 [R]
    block_table,  # int32 [R, table_width]
    moves,  # M
    table_width,
    layers,  # L
    slots,  # P * B
    WIDTH: tl.constexpr,  # words of a row
    INDEX_WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    layer = tl.program_id(0)
    r = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    pool = k
    if layer >= layers:
        pool = v
    if layer >= 2 * layers:
        pool = index
    ordinal = (layer % layers).to(tl.int64)
    width = WIDTH
    if layer >= 2 * layers:
        ordinal = (layer - 2 * layers).to(tl.int64)
        width = INDEX_WIDTH
    m = tl.arange(0, M)
    node = tl.load(path + r * moves + m, mask=m < moves, other=-1)
    live = node >= 0
    known = tl.load(committed + r)
    source = known + node
    target = known + 1 + m
    table = block_table + r * table_width
    source_page = tl.load(table + source // PAGE, mask=live, other=0).to(tl.int64)
    target_page = tl.load(table + target // PAGE, mask=live, other=0).to(tl.int64)
    source_at = (ordinal * slots + source_page * PAGE + source % PAGE) * width
    target_at = (ordinal * slots + target_page * PAGE + target % PAGE) * width
    ok = live[:, None] & (column < width)[None, :]
    rows = tl.load(pool + source_at[:, None] + column[None, :], mask=ok)
    tl.debug_barrier()  # other threads of the program store where this one loads
    tl.store(pool + target_at[:, None] + column[None, :], rows, mask=ok)


def commit_rows(k_LPBKD: Tensor, v_LPBKD: Tensor, index_SPBD: Tensor, path_RM: Tensor, batch: Batch) -> None:
    """In place. `path_RM` int64: node numbers in order of depth, root excluded, padded with -1. The index keys may have
    another type than k and v: rows move as words of 32 bits."""
    layers, pages, page, heads, dim = k_LPBKD.shape
    require_tensor("k", k_LPBKD, (None, None, batch.page_size, None, None), POOL_FLOATS)
    require_tensor("v", v_LPBKD, tuple(k_LPBKD.shape), (k_LPBKD.dtype,))
    require_tensor("index_k", index_SPBD, (None, pages, page, None), POOL_FLOATS)
    require_tensor("path", path_RM, (batch.num_sequences, None), (torch.int64,))
    require(path_RM.shape[1] <= 64, "a path has at most 64 nodes")
    if path_RM.shape[1] == 0:
        return
    k, v, index = (pool.flatten(3).view(torch.int32) for pool in (k_LPBKD, v_LPBKD, index_SPBD))
    columns = 128
    programs = 2 * layers + len(index), batch.num_sequences, cdiv(max(k.shape[3], index.shape[3]), columns)
    commit_kernel[programs](
        k, v, index, path_RM.contiguous(), batch.committed, batch.block_table, path_RM.shape[1],
        batch.block_table.shape[1], layers, pages * page, WIDTH=k.shape[3], INDEX_WIDTH=index.shape[3], PAGE=page,
        M=power_of_two(path_RM.shape[1]), COLUMNS=columns, PDL=PDL, **launch_options(4, 1),
    )  # fmt: skip
