"""Block-sparse grouped-query attention over the chosen pages. The kernels are in decode_attention.py, attention.py and
chosen_lists.py.

Shapes: T rows, Q query heads, K kv heads (= index heads), D head dim, P pages, B slots, N chosen blocks.
Few rows: every row for itself, split over its own blocks, partials joined. Else tiles of rows over the union of their
blocks, so that rows share what they load: 8 rows (128 with their heads) in prefill, 4 in trees, whose rows choose less
alike.
"""

import functools

import torch
from torch import Tensor

from target_model.batch import Batch
from target_model.kernels.chosen_lists import union_kernel
from target_model.kernels.common import (
    INTERPRETED,
    LOG2_E,
    PDL,
    cdiv,
    launch_options,
    power_of_two,
    require,
    require_tensor,
)
from target_model.kernels.decode_attention import decode_kernel
from target_model.kernels.paged_attention import PROGRAMS, check_attention, combine, run_attention

FEW_ROWS = 8  # a tree of up to so many rows (all sequences together) does not gain from sharing loads
MOST_COUNTERS = 4096


def sparse_attention(
    q_TQD: Tensor,
    k_pool_PBKD: Tensor,
    v_pool_PBKD: Tensor,
    blocks_TKN: Tensor,
    batch: Batch,
    scale: float,
    first_slot: int = 0,
    scratch_chosen: bool = True,
) -> Tensor:
    """Softmax attention over the visible keys in slots >= first_slot of the chosen blocks, and of all scratch keys
    without `scratch_chosen`, [T, Q, D].
    """
    check_attention(q_TQD, k_pool_PBKD, v_pool_PBKD, batch)
    require_tensor("blocks", blocks_TKN, (batch.num_rows, k_pool_PBKD.shape[2], None), (torch.int32,))
    require(power_of_two(blocks_TKN.shape[2]) <= 64, "at most 64 chosen blocks are supported")
    operands = (q_TQD, k_pool_PBKD, v_pool_PBKD, blocks_TKN, batch, scale)
    if batch.max_rows == 1 or (batch.ancestors is not None and batch.num_rows <= FEW_ROWS):
        return by_rows(*operands, first_slot=first_slot, scratch_chosen=scratch_chosen)[0]
    return tiled(*operands, first_slot=first_slot, scratch_chosen=scratch_chosen)[0]


@functools.cache
def arrival_counters(device: torch.device) -> Tensor:
    """Zeros, which kernels leave as they found them. Two streams must not use them at the same time."""
    return torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)


def by_rows(
    q_TQD: Tensor,
    k_pool_PBKD: Tensor,
    v_pool_PBKD: Tensor,
    blocks_TKN: Tensor,
    batch: Batch,
    scale: float,
    *,
    first_slot: int = 0,
    scratch_chosen: bool = True,
    parts: int | None = None,
    last: bool | None = None,
    block_n: int = 128,
    num_warps: int = 4,
    num_stages: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Every row for itself, in `parts`, joined by the one that ends `last` or by a launch of its own: (out, log-sum).

    One program a multiprocessor with two tiles under way, or two with one."""
    rows, heads, dim = q_TQD.shape
    kv_heads, count = blocks_TKN.shape[1:]
    tree = batch.ancestors is not None
    if parts is None:
        parts = 1
        while parts * 2 <= count and rows * kv_heads * parts * 2 <= PROGRAMS // 2:
            parts *= 2
        if tree and rows > 1:
            parts = 1 + cdiv(count, 4)  # the last for the scratch slots
    block_n = min(batch.page_size, 32 if q_TQD.dtype == torch.float32 else block_n)  # fp32: less shared memory
    tiles = cdiv(count * (batch.page_size // block_n), parts)
    if num_stages is None:
        num_stages = 1 if tiles == 1 else 3 if rows * kv_heads * parts <= PROGRAMS // 2 else 2
    if last is None:
        last = parts <= 4 and rows * kv_heads <= MOST_COUNTERS
    out = torch.empty(rows, heads, dim, dtype=q_TQD.dtype, device=q_TQD.device)
    joined = torch.empty(rows, heads, dtype=torch.float32, device=q_TQD.device)
    partial, lse = out, joined
    if parts > 1:
        partial = torch.empty(parts, rows, heads, dim, dtype=torch.float32, device=q_TQD.device)
        lse = torch.empty(parts, rows, heads, dtype=torch.float32, device=q_TQD.device)
    one = rows == batch.num_sequences and batch.max_rows == 1
    decode_kernel[(kv_heads * parts, batch.num_sequences, batch.max_rows)](
        q_TQD, k_pool_PBKD, v_pool_PBKD, out, partial, lse, joined, arrival_counters(q_TQD.device), batch.row_start,
        batch.committed, batch.slots, batch.positions, batch.block_table,
        batch.ancestors if tree else batch.row_start, blocks_TKN, rows * heads, q_TQD.stride(0),
        batch.block_table.shape[1], first_slot, scale * LOG2_E, ONE=one, TREE=tree, LAST=last, HEADS=kv_heads,
        GROUP=heads // kv_heads, D=dim, PAGE=batch.page_size, N=count, TILES=tiles, PARTS=parts,
        BLOCK_M=max(16, heads // kv_heads), BLOCK_N=block_n, STAGES=num_stages, FIRST=first_slot > 0,
        SCRATCH_CHOSEN=scratch_chosen, UPCAST=INTERPRETED, PDL=PDL, **launch_options(num_warps, 1),
    )  # fmt: skip
    if parts > 1 and not last:
        joined = combine(partial, lse, out)
    return out, joined


def tiled(
    q_TQD: Tensor,
    k_pool_PBKD: Tensor,
    v_pool_PBKD: Tensor,
    blocks_TKN: Tensor,
    batch: Batch,
    scale: float,
    *,
    first_slot: int = 0,
    scratch_chosen: bool = True,
    block_t: int | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Tiles of `block_t` rows over the union of their blocks: (out, log-sum). 8 rows in prefill (128 with their heads),
    4 in trees, whose rows choose less alike."""
    rows, heads, _ = q_TQD.shape
    kv_heads, count = blocks_TKN.shape[1:]
    group = heads // kv_heads
    tree = batch.ancestors is not None
    if block_t is None:
        # The union of a tile is found among at most 128 choices, and has a bit for each of at most 32 rows.
        block_t = min(max(1, (64 if tree else 128) // group), 32, max(1, 128 // power_of_two(count)))
        block_t = min(block_t, power_of_two(batch.max_rows))
    if splits is None:
        programs = cdiv(batch.max_rows, block_t) * kv_heads * batch.num_sequences
        splits = power_of_two(min(16, max(1, PROGRAMS // programs)) + 1) // 2 if tree else 1
    tiles = rows // block_t + batch.num_sequences
    union = torch.empty(2, tiles, kv_heads, block_t * count, dtype=torch.int32, device=q_TQD.device)
    sizes = torch.empty(tiles, kv_heads, dtype=torch.int32, device=q_TQD.device)
    union_kernel[(cdiv(batch.max_rows, block_t) * kv_heads, batch.num_sequences)](
        blocks_TKN, batch.row_start, batch.committed, *union, sizes, TREE=tree, HEADS=kv_heads, PAGE=batch.page_size,
        N=count, N_PAD=power_of_two(count), BLOCK_T=block_t, PDL=PDL,
        **launch_options(8 if block_t * power_of_two(count) >= 128 else 4, 1),
    )  # fmt: skip
    wide = block_t * group >= 128
    return run_attention(
        q_TQD, k_pool_PBKD, v_pool_PBKD, batch, scale, splits=splits, block_t=block_t, block_n=64,
        choice_TKN=blocks_TKN, union=(*union, sizes), first_slot=first_slot, scratch_chosen=scratch_chosen and tree,
        num_warps=8 if wide else 4, num_stages=3 if tree else 2, registers=128 if wide else None,
    )  # fmt: skip
