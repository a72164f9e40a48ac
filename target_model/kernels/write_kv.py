"""Stores rows of keys, values and index keys in their slots of the paged cache, rounded to the pool's dtype.

pool[physical_slots[t]] = rows[t];  T rows, K kv heads, D head dim, P pages, B slots. One program a row.
"""

import triton
import triton.language as tl
from torch import Tensor

from target_model.batch import Batch
from target_model.kernels.common import (
    FLOATS,
    PDL,
    POOL_FLOATS,
    begin,
    launch_options,
    power_of_two,
    require,
    require_tensor,
)


@triton.jit
def write_kernel(
    rows,  # [T, WIDTH], row stride given
    pool,  # [P * B, WIDTH]
    physical_slots,  # int64 [T]
    row_stride,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(physical_slots + t)
    i = tl.arange(0, WIDTH_PAD)
    x = tl.load(rows + t * row_stride + i, mask=i < WIDTH)
    tl.store(pool + slot * WIDTH + i, x.to(pool.dtype.element_ty), mask=i < WIDTH)


def write_rows(name: str, rows_T: Tensor, pool_PB: Tensor, batch: Batch) -> None:
    """rows [T, ...] into pool [P, B, ...]."""
    width = rows_T[0].numel()
    require_tensor(name, rows_T, (batch.num_rows, *pool_PB.shape[2:]), FLOATS, contiguous=False)
    require(rows_T.dim() == 2 or rows_T.stride(1) == rows_T.shape[2], f"heads of {name} must be adjacent")
    require_tensor(f"{name} pool", pool_PB, tuple(pool_PB.shape), POOL_FLOATS)
    write_kernel[(batch.num_rows,)](
        rows_T, pool_PB, batch.physical_slots, rows_T.stride(0), WIDTH=width, WIDTH_PAD=power_of_two(width), PDL=PDL,
        **launch_options(1, 1),
    )  # fmt: skip


def write_kv(k_TKD: Tensor, v_TKD: Tensor, k_pool_PBKD: Tensor, v_pool_PBKD: Tensor, batch: Batch) -> None:
    """Stores the rows' keys and values in their slots."""
    write_rows("k", k_TKD, k_pool_PBKD, batch)
    write_rows("v", v_TKD, v_pool_PBKD, batch)


def write_index_k(index_k_TD: Tensor, pool_PBD: Tensor, batch: Batch) -> None:
    """Stores the rows' index keys in their slots."""
    write_rows("index_k", index_k_TD, pool_PBD, batch)
