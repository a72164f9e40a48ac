"""Per-head Gemma norm, partial RoPE and cache write in one pass over the packed projection.

For a row t and its heads q | k | index q | index k (n of them, then v, which only moves):
    y = x * rsqrt(mean(x^2) + eps) * scale[n];  z = y * cos[t] + y[swapped] * sin[t];  z rounds to x's dtype
q and index q go to new tensors, k, v and index k to their slots of the cache, rounded to its dtype.
T rows, Q query heads, K kv heads, J index heads, D head dim, P pages, B slots. cos and sin are full-width tables: 1 and
0 on the dims that pass, the first half of the rotated dims has its sine negated. A program covers one row and HEADS
heads.
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
def norm_rope_kernel(
    packed,  # [T, Q + K + J + 1 + K, D], row stride given (no J + 1 without INDEX)
    scale,  # fp32 [at least Q + K (+ J + 1), D]
    cosine,  # fp32 [T, D]
    sine,  # fp32 [T, D]
    physical_slots,  # int64 [T]
    q,  # [T, Q, D]
    index_q,  # [T, J, D]
    k_pool,  # [P * B, K, D]
    v_pool,  # [P * B, K, D]
    index_pool,  # [P * B, D]
    row_stride,
    first_v,  # head of the packed row where v begins
    eps,
    Q: tl.constexpr,
    K: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # half of the rotated dims
    HEADS: tl.constexpr,
    INDEX: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    NORMED: tl.constexpr = Q + K + (J + 1 if INDEX else 0)
    n = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, D)
    swapped = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    slot = tl.load(physical_slots + t)

    source = packed + t * row_stride + tl.where(n < NORMED, n, n - NORMED + first_v)[:, None] * D
    live = (n < NORMED + K)[:, None]
    x = tl.load(source + d[None, :], mask=live, other=0.0)
    normed = (n < NORMED)[:, None]
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
    other = tl.load(source + swapped[None, :], mask=normed, other=0.0).to(tl.float32)
    y = wide * inverse * tl.load(scale + n[:, None] * D + d[None, :], mask=normed, other=0.0)
    other = other * inverse * tl.load(scale + n[:, None] * D + swapped[None, :], mask=normed, other=0.0)
    z = y * tl.load(cosine + t * D + d)[None, :] + other * tl.load(sine + t * D + d)[None, :]
    z = tl.where(normed, z, wide).to(packed.dtype.element_ty)

    tl.store(q + (t * Q + n)[:, None] * D + d[None, :], z, mask=(n < Q)[:, None])
    key = z.to(k_pool.dtype.element_ty)
    tl.store(k_pool + (slot * K + n - Q)[:, None] * D + d[None, :], key, mask=((n >= Q) & (n < Q + K))[:, None])
    tl.store(v_pool + (slot * K + n - NORMED)[:, None] * D + d[None, :], key, mask=live & (n >= NORMED)[:, None])
    if INDEX:
        at_q = (t * J + n - Q - K)[:, None] * D + d[None, :]
        tl.store(index_q + at_q, z, mask=((n >= Q + K) & (n < Q + K + J))[:, None])
        at_k = slot * D + (n * 0)[:, None] + d[None, :]
        tl.store(index_pool + at_k, z.to(index_pool.dtype.element_ty), mask=(n == Q + K + J)[:, None])


def norm_rope_write(
    packed_TnD: Tensor,
    scale_nD: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    rotary_dim: int,
    eps: float,
    num_heads: int,
    k_pool_PBKD: Tensor,
    v_pool_PBKD: Tensor,
    index_pool_PBD: Tensor | None,
    index_heads: int,
    batch: Batch,
) -> tuple[Tensor, Tensor | None]:
    """Queries [T, Q, D] and index queries [T, J, D] (None without `index_pool`), normalised and rotated; keys and
    values are stored.

    `packed` holds q | k | index q | index k | v; a layer that reuses an earlier choice has index heads and passes
    index_pool None.
    """
    rows, total, dim = packed_TnD.shape
    kv_heads = k_pool_PBKD.shape[2]
    index = index_pool_PBD is not None
    normed = num_heads + kv_heads + (index_heads + 1 if index else 0)
    require_tensor("packed", packed_TnD, (batch.num_rows, None, dim), FLOATS, contiguous=False)
    require(packed_TnD.stride(1) == dim, "heads of packed must be adjacent")
    require(dim == power_of_two(dim), f"head_dim {dim} is not supported: a power of two")
    require(total >= normed + kv_heads, f"packed has {total} heads, needs at least {normed + kv_heads}")
    require_tensor("scale", scale_nD, (None, dim), (torch.float32,))
    for name, table in (("cos", cos_TD), ("sin", sin_TD)):
        require_tensor(name, table, (rows, dim), (torch.float32,))
    require_tensor("k_pool", k_pool_PBKD, (None, batch.page_size, kv_heads, dim), POOL_FLOATS)
    require_tensor("v_pool", v_pool_PBKD, tuple(k_pool_PBKD.shape), (k_pool_PBKD.dtype,))
    if index:
        require_tensor("index_pool", index_pool_PBD, (None, batch.page_size, dim), POOL_FLOATS)
    q = torch.empty(rows, num_heads, dim, dtype=packed_TnD.dtype, device=packed_TnD.device)
    index_q = torch.empty(rows, index_heads, dim, dtype=packed_TnD.dtype, device=packed_TnD.device) if index else None
    heads = 16
    norm_rope_kernel[(rows, cdiv(normed + kv_heads, heads))](
        packed_TnD, scale_nD, cos_TD, sin_TD, batch.physical_slots, q, index_q if index else q, k_pool_PBKD,
        v_pool_PBKD,
        index_pool_PBD if index else k_pool_PBKD, packed_TnD.stride(0), total - kv_heads, eps, Q=num_heads, K=kv_heads,
        J=max(index_heads, 1), D=dim, HALF=rotary_dim // 2, HEADS=heads, INDEX=index, PDL=PDL, **launch_options(4, 1),
    )  # fmt: skip
    return q, index_q
