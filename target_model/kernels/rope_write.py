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
    begin,
    cdiv,
    launch_options,
    power_of_two,
    require,
    require_tensor,
)


@triton.jit
def load_halves(heads, ok, HALF: tl.constexpr):
    """Lower and upper dims, fp32 [H, HALF] both, of the heads [H] that these pointers show; 0 where not `ok`."""
    at = heads[:, None] + tl.arange(0, HALF)[None, :]
    low = tl.load(at, mask=ok[:, None], other=0.0).to(tl.float32)
    return low, tl.load(at + HALF, mask=ok[:, None], other=0.0).to(tl.float32)


@triton.jit
def rotation(position, frequencies, turned, HALF: tl.constexpr):
    """Cosine and sine of the angles at a position, fp32 [H, HALF] both; 1 and 0 for heads [H] that are not `turned`."""
    angle = position.to(tl.float32) * tl.load(frequencies + tl.arange(0, HALF))
    cos = tl.where(turned[:, None], tl.cos(angle)[None, :], 1.0)
    sin = tl.where(turned[:, None], tl.sin(angle)[None, :], 0.0)
    return cos, sin


@triton.jit
def store_halves(heads, ok, low, high, HALF: tl.constexpr):
    """The other way round."""
    at = heads[:, None] + tl.arange(0, HALF)[None, :]
    tl.store(at, low.to(heads.dtype.element_ty), mask=ok[:, None])
    tl.store(at + HALF, high.to(heads.dtype.element_ty), mask=ok[:, None])


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
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    low, high = load_halves(packed + (t * (Q + 2 * K) + h) * (2 * HALF), h < Q + 2 * K, HALF)
    cos, sin = rotation(tl.load(positions + t), frequencies, h < Q + K, HALF)
    low, high = low * cos - high * sin, high * cos + low * sin
    slot = tl.load(physical_slots + t) * K
    is_k, is_v = (h >= Q) & (h < Q + K), (h >= Q + K) & (h < Q + 2 * K)
    store_halves(q + (t * Q + h) * (2 * HALF), h < Q, low, high, HALF)
    store_halves(k_pool + (slot + h - Q) * (2 * HALF), is_k, low, high, HALF)
    store_halves(v_pool + (slot + h - Q - K) * (2 * HALF), is_v, low, high, HALF)


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
