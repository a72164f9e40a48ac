"""Rotates the draft's queries and keys and stores its keys and values in their slots, straight from the packed
projection.

    q, k: x[t, h] rotated by the angles position[t] * frequency (rotate-half over the whole head);  v as it is
T rows, Q query heads, K kv heads, n = Q + 2 K packed heads in the order q | k | v, D head dim (a power of two), P
pages, B slots. A program takes BLOCK_H heads of one row. Angles in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from target_model.batch import Batch
from target_model.kernels.common import (
    FLOATS,
    PDL,
    POOL_FLOATS,
    cdiv,
    launch_options,
    power_of_two,
    require,
    require_tensor,
)


@triton.jit
def rope_write_kernel(
    packed,  # [T, n, D]
    positions,  # int64 [T]
    frequencies,  # fp32 [D / 2]
    q,  # [T, Q, D]
    k_pool,  # [P * B, K, D]
    v_pool,  # [P * B, K, D]
    physical_slots,  # int64 [T]
    Q: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, HALF)
    at = (t * (Q + 2 * K) + h)[:, None] * (2 * HALF) + i[None, :]
    first = tl.load(packed + at, mask=(h < Q + 2 * K)[:, None], other=0.0).to(tl.float32)
    second = tl.load(packed + at + HALF, mask=(h < Q + 2 * K)[:, None], other=0.0).to(tl.float32)
    angle = tl.load(positions + t).to(tl.float32) * tl.load(frequencies + i)
    turned = (h < Q + K)[:, None]
    cos = tl.where(turned, tl.cos(angle)[None, :], 1.0)
    sin = tl.where(turned, tl.sin(angle)[None, :], 0.0)
    low, high = first * cos - second * sin, second * cos + first * sin
    slot = tl.load(physical_slots + t) * K
    to = q + (t * Q + h)[:, None] * (2 * HALF) + i[None, :]
    tl.store(to, low.to(q.dtype.element_ty), mask=(h < Q)[:, None])
    tl.store(to + HALF, high.to(q.dtype.element_ty), mask=(h < Q)[:, None])
    is_k = ((h >= Q) & (h < Q + K))[:, None]
    to = k_pool + (slot + h - Q)[:, None] * (2 * HALF) + i[None, :]
    tl.store(to, low.to(k_pool.dtype.element_ty), mask=is_k)
    tl.store(to + HALF, high.to(k_pool.dtype.element_ty), mask=is_k)
    is_v = ((h >= Q + K) & (h < Q + 2 * K))[:, None]
    to = v_pool + (slot + h - Q - K)[:, None] * (2 * HALF) + i[None, :]
    tl.store(to, low.to(v_pool.dtype.element_ty), mask=is_v)
    tl.store(to + HALF, high.to(v_pool.dtype.element_ty), mask=is_v)


def rope_write(
    packed_TnD: Tensor,
    frequencies_F: Tensor,
    num_heads: int,
    k_pool_PBKD: Tensor,
    v_pool_PBKD: Tensor,
    batch: Batch,
) -> Tensor:
    """Rotated queries [T, Q, D]; keys and values go to their slots. `frequencies_F` fp32 [D / 2]."""
    rows, heads, dim = packed_TnD.shape
    kv_heads = k_pool_PBKD.shape[2]
    require_tensor("packed", packed_TnD, (batch.num_rows, num_heads + 2 * kv_heads, dim), FLOATS)
    require_tensor("frequencies", frequencies_F, (dim // 2,), (torch.float32,))
    require_tensor("k pool", k_pool_PBKD, (None, batch.page_size, kv_heads, dim), POOL_FLOATS)
    require_tensor("v pool", v_pool_PBKD, tuple(k_pool_PBKD.shape), (k_pool_PBKD.dtype,))
    require(dim == power_of_two(dim), f"head_dim {dim} is not supported: a power of two")
    q = torch.empty(rows, num_heads, dim, dtype=packed_TnD.dtype, device=packed_TnD.device)
    rope_write_kernel[(rows, cdiv(heads, 8))](
        packed_TnD, batch.positions, frequencies_F, q, k_pool_PBKD, v_pool_PBKD, batch.physical_slots, Q=num_heads,
        K=kv_heads, HALF=dim // 2, BLOCK_H=8, PDL=PDL, **launch_options(4, 1),
    )  # fmt: skip
    return q
