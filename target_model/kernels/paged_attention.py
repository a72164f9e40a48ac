"""Dense attention over the paged cache, causal rows or trees: layers without MSA and the draft. The kernel is in
attention.py.

Shapes: T rows, Q query heads, K kv heads, D head dim, P pages, B slots, S splits of the keys.
"""

import torch
from torch import Tensor

from target_model.batch import Batch
from target_model.kernels.attention import attention_kernel, combine_kernel
from target_model.kernels.common import (
    FLOATS,
    INTERPRETED,
    LOG2_E,
    PDL,
    POOL_FLOATS,
    cdiv,
    launch_options,
    power_of_two,
    require,
    require_tensor,
)

# Two programs for each multiprocessor of an H100 or H200; in the interpreter just enough for several splits.
PROGRAMS = 8 if INTERPRETED else 264


def check_attention(q_TQD: Tensor, k_pool_PBKD: Tensor, v_pool_PBKD: Tensor, batch: Batch) -> None:
    """The conditions that all attention kernels share."""
    rows, heads, dim = q_TQD.shape
    kv_heads = k_pool_PBKD.shape[2]
    require_tensor("q", q_TQD, (batch.num_rows, None, None), FLOATS, contiguous=False)
    require(q_TQD.stride(1) == dim, "heads of q must be adjacent")
    require_tensor("k_pool", k_pool_PBKD, (None, batch.page_size, None, dim), POOL_FLOATS)
    require_tensor("v_pool", v_pool_PBKD, tuple(k_pool_PBKD.shape), (k_pool_PBKD.dtype,))
    require(dim in (32, 64, 128), f"head_dim {dim} is not supported: 32, 64 or 128")
    require(batch.page_size in (16, 32, 64, 128), f"page size {batch.page_size} is not supported: 16, 32, 64 or 128")
    require(heads % kv_heads == 0, f"{heads} query heads do not divide into {kv_heads} kv heads")
    group = heads // kv_heads
    require(group in (1, 2, 4, 8, 16), f"group size {group} is not supported: a power of two up to 16")
    require(batch.ancestors is None or batch.max_rows <= 64, "a tree has at most 64 rows")


def run_attention(
    q_TQD: Tensor,
    k_pool_PBKD: Tensor,
    v_pool_PBKD: Tensor,
    batch: Batch,
    scale: float,
    *,
    splits: int,
    block_t: int,
    block_n: int | None = None,
    first_slot: int = 0,
    scratch_chosen: bool = False,
    choice_TKN: Tensor | None = None,
    union: tuple[Tensor, Tensor, Tensor] | None = None,
    num_warps: int = 4,
    num_stages: int = 2,
    registers: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launches `attention_kernel` (over the blocks of `union`: ids, rows, counts) and, with several splits,
    `combine_kernel`. Returns (out [T, Q, D], log2 of the sum of exponentials [T, Q])."""
    rows, heads, dim = q_TQD.shape
    kv_heads = k_pool_PBKD.shape[2]
    group = heads // kv_heads
    out = torch.empty(rows, heads, dim, dtype=q_TQD.dtype, device=q_TQD.device)
    lse = torch.empty(splits, rows, heads, dtype=torch.float32, device=q_TQD.device)
    partial = out
    if splits > 1:
        partial = torch.empty(splits, rows, heads, dim, dtype=torch.float32, device=q_TQD.device)
    unused = batch.row_start
    block_n = 32 if q_TQD.dtype == torch.float32 else block_n or 128  # twice as wide: shared memory holds fewer keys
    lists, list_rows, list_count = union if union is not None else (unused,) * 3
    choice = unused if choice_TKN is None else choice_TKN
    attention_kernel[(cdiv(batch.max_rows, block_t) * kv_heads * splits, batch.num_sequences)](
        q_TQD, k_pool_PBKD, v_pool_PBKD, partial, lse, batch.row_start, batch.committed, batch.slots,
        batch.positions, batch.block_table, unused if batch.ancestors is None else batch.ancestors, choice, lists,
        list_rows, list_count, rows * heads, q_TQD.stride(0), batch.block_table.shape[1], lists.shape[-1], first_slot,
        splits, scale * LOG2_E, UNION=union is not None, TREE=batch.ancestors is not None, HEADS=kv_heads,
        GROUP=group, D=dim, PAGE=batch.page_size, BLOCK_T=block_t, BLOCK_M=max(16, block_t * group),
        BLOCK_N=min(batch.page_size, block_n), SPLIT=splits > 1, FIRST=first_slot > 0,
        SCRATCH_CHOSEN=scratch_chosen, N=choice.shape[-1] if scratch_chosen else 1, UPCAST=INTERPRETED, PDL=PDL,
        **launch_options(num_warps, num_stages, registers),
    )  # fmt: skip
    if splits == 1:
        return out, lse[0]
    return out, combine(partial, lse, out)


def combine(partial_STQD: Tensor, lse_STQ: Tensor, out_TQD: Tensor) -> Tensor:
    """Joins partial results into `out_TQD`; returns log2-sums [T, Q]."""
    rows, heads, dim = out_TQD.shape
    parts = partial_STQD.shape[0]
    block_r = 1 if rows * heads <= 2048 else 8
    joined = torch.empty(rows, heads, dtype=torch.float32, device=out_TQD.device)
    combine_kernel[(cdiv(rows * heads, block_r),)](
        partial_STQD, lse_STQ, out_TQD, joined, rows * heads, parts, D=dim, PARTS=power_of_two(parts), BLOCK_R=block_r,
        PDL=PDL,
        **launch_options(4, 1),
    )  # fmt: skip
    return joined


def dense_shape(batch: Batch, kv_heads: int, group: int) -> dict:
    """Rows of a tile and splits of the keys: full 128-row tiles for many rows, enough programs for few."""
    # Fewer rows than a matrix product takes would be other kernels to compile, and no faster ones.
    block_t = min(power_of_two(max(batch.max_rows, 16 // group)), max(1, 128 // group))
    tiles = cdiv(batch.max_rows, block_t) * kv_heads * batch.num_sequences
    pages = cdiv(batch.max_context, batch.page_size)
    splits = 1
    while splits < 64 and tiles * splits < PROGRAMS and splits * 2 <= pages:
        splits *= 2
    wide = block_t * group >= 128
    if wide:
        return {"block_t": block_t, "splits": splits, "block_n": 64, "num_warps": 8, "registers": 128}
    return {"block_t": block_t, "splits": splits, "num_warps": 4}


def paged_attention(
    q_TQD: Tensor, k_pool_PBKD: Tensor, v_pool_PBKD: Tensor, batch: Batch, scale: float, first_slot: int = 0
) -> Tensor:
    """Softmax attention over the visible keys in slots >= first_slot, [T, Q, D]."""
    check_attention(q_TQD, k_pool_PBKD, v_pool_PBKD, batch)
    kv_heads = k_pool_PBKD.shape[2]
    shape = dense_shape(batch, kv_heads, q_TQD.shape[1] // kv_heads)
    out, _ = run_attention(q_TQD, k_pool_PBKD, v_pool_PBKD, batch, scale, first_slot=first_slot, **shape)
    return out
