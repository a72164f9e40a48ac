"""Block-sparse grouped-query attention over the chosen pages. The kernels are in attention.py and chosen_lists.py.

Shapes: T rows, Q query heads, K kv heads (= index heads), D head dim, P pages, B slots, N chosen blocks.
One row a sequence: split over the row's own blocks, partials joined. Else tiles of rows over the union of their blocks,
so that rows share what they load: 8 rows (128 with their heads) in prefill, 4 in trees, whose rows choose less alike.
"""

import torch
from torch import Tensor

from target_model.batch import Batch
from target_model.kernels.chosen_lists import union_kernel
from target_model.kernels.common import (
    PDL,
    cdiv,
    launch_options,
    power_of_two,
    require,
    require_tensor,
)
from target_model.kernels.paged_attention import PROGRAMS, check_attention, run_attention


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
    group = q_TQD.shape[1] // k_pool_PBKD.shape[2]
    if batch.max_rows == 1:
        return decode(
            q_TQD,
            k_pool_PBKD,
            v_pool_PBKD,
            blocks_TKN,
            batch,
            scale,
            first_slot=first_slot,
            scratch_chosen=scratch_chosen,
        )[0]
    # The union of a tile is found among at most 128 choices, and has a bit for each of at most 32 rows.
    most = min(32, max(1, 128 // power_of_two(blocks_TKN.shape[2])))
    if batch.ancestors is None:
        block_t = min(max(1, 128 // group), most)
        wide = block_t * group >= 128
        shape = {"block_t": block_t, "num_warps": 8 if wide else 4, "registers": 128 if wide else None}
    else:
        block_t = min(power_of_two(batch.max_rows), max(1, 64 // group), most)
        tiles = cdiv(batch.max_rows, block_t) * k_pool_PBKD.shape[2] * batch.num_sequences
        splits = power_of_two(min(16, max(1, PROGRAMS // tiles)) + 1) // 2
        shape = {"block_t": block_t, "splits": splits, "num_warps": 4, "num_stages": 3}
    shape |= {"first_slot": first_slot, "scratch_chosen": scratch_chosen}
    return tiled(q_TQD, k_pool_PBKD, v_pool_PBKD, blocks_TKN, batch, scale, block_n=64, **shape)[0]


def decode(
    q_TQD: Tensor,
    k_pool_PBKD: Tensor,
    v_pool_PBKD: Tensor,
    blocks_TKN: Tensor,
    batch: Batch,
    scale: float,
    *,
    first_slot: int = 0,
    scratch_chosen: bool = True,
    splits: int | None = None,
    num_warps: int = 4,
    num_stages: int | None = None,
) -> tuple[Tensor, Tensor]:
    """One row a sequence: (out, log-sum)."""
    rows, kv_heads, count = blocks_TKN.shape
    if splits is None:
        splits = 1
        while splits * 2 <= count and rows * kv_heads * splits * 2 <= PROGRAMS:
            splits *= 2
    if num_stages is None:
        num_stages = 1 if splits == count else 2  # a single block each: nothing to pipeline
    return run_attention(
        q_TQD, k_pool_PBKD, v_pool_PBKD, batch, scale, mode="chosen", splits=splits, block_t=1, choice_TKN=blocks_TKN,
        first_slot=first_slot, scratch_chosen=scratch_chosen, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def tiled(
    q_TQD: Tensor,
    k_pool_PBKD: Tensor,
    v_pool_PBKD: Tensor,
    blocks_TKN: Tensor,
    batch: Batch,
    scale: float,
    *,
    block_t: int,
    first_slot: int = 0,
    scratch_chosen: bool = True,
    splits: int = 1,
    block_n: int | None = None,
    num_warps: int = 8,
    num_stages: int = 2,
    registers: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Tiles of `block_t` rows over the union of their blocks: (out, log-sum)."""
    rows, kv_heads, count = blocks_TKN.shape
    require(block_t <= 32, "a tile has at most 32 rows: one bit each in the union's list")
    tiles = rows // block_t + batch.num_sequences
    union = torch.empty(3, tiles, kv_heads, block_t * count, dtype=torch.int32, device=q_TQD.device)
    sizes = torch.empty(tiles, kv_heads, dtype=torch.int32, device=q_TQD.device)
    union_kernel[(cdiv(batch.max_rows, block_t) * kv_heads, batch.num_sequences)](
        blocks_TKN, batch.row_start, batch.committed, batch.block_table, *union, sizes, batch.block_table.shape[1],
        TREE=batch.ancestors is not None, HEADS=kv_heads,
        PAGE=batch.page_size, N=count, N_PAD=power_of_two(count), BLOCK_T=block_t, PDL=PDL,
        **launch_options(8 if block_t * power_of_two(count) >= 128 else 4, 1),
    )  # fmt: skip
    return run_attention(
        q_TQD, k_pool_PBKD, v_pool_PBKD, batch, scale, mode="union", splits=splits, block_t=block_t, block_n=block_n,
        choice_TKN=blocks_TKN, union=(*union, sizes), first_slot=first_slot,
        scratch_chosen=scratch_chosen, num_warps=num_warps, num_stages=num_stages, registers=registers,
    )  # fmt: skip
