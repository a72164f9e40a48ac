"""Attention to a row's own column in training: merged into attention over other keys, and its gradient.

    s_c = scale * q . k_c,  L' = log(exp(L) + sum_c exp(s_c)),  out' = exp(L - L') out + sum_c exp(s_c - L') v_c
    p_c = exp(s_c - L'),  ds_c = p_c (dout . v_c - dout . out') scale
    dv_c = p_c dout,  dk_c = ds_c q,  dq += sum_c ds_c k_c
N rows, Q query heads, K kv heads, G = Q / K query heads share one, D head dim, C keys in the column, each a tensor
[N, K, D] of its own: kernels take their addresses, so they are never put side by side. A program takes some kv heads of
one row, all keys of the column one after the other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from target_model.kernels.common import FLOATS, power_of_two, require, require_tensor


@triton.jit
def _tensor(address, like):
    """The tensor at a stored address: its type is that of `like`, and PyTorch's allocator aligns it."""
    return tl.multiple_of(tl.load(address).to(like.dtype), 16)


@triton.jit
def places(K, G, D, KB: tl.constexpr, GB: tl.constexpr, DB: tl.constexpr):
    """Where a program's heads [KB, GB, 1], their dims [KB, GB, DB] and their keys' dims [KB, 1, DB] are, and which of
    each there are."""
    n = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1) * KB + tl.arange(0, KB)[:, None, None]
    g = tl.arange(0, GB)[None, :, None]
    d = tl.arange(0, DB)[None, None, :]
    head = (n * K + kv) * G + g
    head_on = (kv < K) & (g < G)
    return head, head * D + d, (n * K + kv) * D + d, head_on, head_on & (d < D), (kv < K) & (d < D)


@triton.jit
def merge_column_kernel(
    q,  # [N, Q, D]
    part,  # [N, Q, D] attention over the other keys
    lse,  # fp32 [N, Q]
    addresses,  # int64 [2C] of keys, then of values, [N, K, D] each
    out,  # [N, Q, D]
    out_lse,  # fp32 [N, Q]
    scale,
    C,
    K,
    G,
    D,
    KB: tl.constexpr,
    GB: tl.constexpr,
    DB: tl.constexpr,
):
    head, at, column_at, head_on, on, column_on = places(K, G, D, KB, GB, DB)
    wide = tl.load(q + at, mask=on, other=0.0).to(tl.float32)
    acc = tl.load(part + at, mask=on, other=0.0).to(tl.float32)
    top = tl.load(lse + head, mask=head_on, other=0.0)
    total = tl.full([KB, GB, 1], 1.0, tl.float32)
    for c in range(C):
        k = tl.load(_tensor(addresses + c, q) + column_at, mask=column_on, other=0.0).to(tl.float32)
        v = tl.load(_tensor(addresses + C + c, q) + column_at, mask=column_on, other=0.0).to(tl.float32)
        score = tl.sum(wide * k, 2, keep_dims=True) * scale
        new_top = tl.maximum(top, score)
        decay, weight = tl.exp(top - new_top), tl.exp(score - new_top)
        acc = acc * decay + weight * v
        total = total * decay + weight
        top = new_top
    tl.store(out + at, (acc / total).to(out.dtype.element_ty), mask=on)
    tl.store(out_lse + head, top + tl.log(total), mask=head_on)


@triton.jit
def column_gradient_kernel(
    grad,  # [N, Q, D] of the merged output
    q,  # [N, Q, D]
    out,  # [N, Q, D] merged
    lse,  # fp32 [N, Q] merged
    dq,  # [N, Q, D], added to
    addresses,  # int64 [4C] of keys, values, and their gradients, [N, K, D] each
    scale,
    C,
    K,
    G,
    D,
    KB: tl.constexpr,
    GB: tl.constexpr,
    DB: tl.constexpr,
):
    head, at, column_at, head_on, on, column_on = places(K, G, D, KB, GB, DB)
    wide = tl.load(q + at, mask=on, other=0.0).to(tl.float32)
    dout = tl.load(grad + at, mask=on, other=0.0).to(tl.float32)
    total = tl.load(dq + at, mask=on, other=0.0).to(tl.float32)
    row_lse = tl.load(lse + head, mask=head_on, other=0.0)
    expected = tl.sum(dout * tl.load(out + at, mask=on, other=0.0).to(tl.float32), 2, keep_dims=True)
    for c in range(C):
        k = tl.load(_tensor(addresses + c, q) + column_at, mask=column_on, other=0.0).to(tl.float32)
        v = tl.load(_tensor(addresses + C + c, q) + column_at, mask=column_on, other=0.0).to(tl.float32)
        weight = tl.exp(tl.sum(wide * k, 2, keep_dims=True) * scale - row_lse)
        d_score = weight * (tl.sum(dout * v, 2, keep_dims=True) - expected) * scale
        total += d_score * k
        dk = _tensor(addresses + 2 * C + c, q) + column_at
        dv = _tensor(addresses + 3 * C + c, q) + column_at
        tl.store(dk, tl.sum(d_score * wide, 1, keep_dims=True).to(q.dtype.element_ty), mask=column_on)
        tl.store(dv, tl.sum(weight * dout, 1, keep_dims=True).to(q.dtype.element_ty), mask=column_on)
    tl.store(dq + at, total.to(dq.dtype.element_ty), mask=on)


def merge_column(
    q_NQD: Tensor, part_NQD: Tensor, lse_NQ: Tensor, keys: list[Tensor], values: list[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """(attention over the other keys and the column [N, Q, D], its log-sum-exp fp32 [N, Q]) from that over the other
    keys; keys and values [N, K, D] each, at least one.
    """
    _check(q_NQD, [part_NQD], lse_NQ, [*keys, *values])
    out, out_lse = torch.empty_like(part_NQD), torch.empty_like(lse_NQ)
    grid, sizes = _launch(q_NQD, keys[0])
    addresses = _addresses(keys, values)
    merge_column_kernel[grid](q_NQD, part_NQD, lse_NQ, addresses, out, out_lse, scale, len(keys), **sizes)
    return out, out_lse


def column_gradient(
    grad_NQD: Tensor,
    q_NQD: Tensor,
    out_NQD: Tensor,
    lse_NQ: Tensor,
    dq_NQD: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    scale: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of keys and values; that of q is added to `dq`. out and lse are the merged ones."""
    _check(q_NQD, [grad_NQD, out_NQD, dq_NQD], lse_NQ, [*keys, *values])
    dk, dv = ([torch.empty_like(x) for x in part] for part in (keys, values))
    grid, sizes = _launch(q_NQD, keys[0])
    addresses = _addresses(keys, values, dk, dv)
    column_gradient_kernel[grid](grad_NQD, q_NQD, out_NQD, lse_NQ, dq_NQD, addresses, scale, len(keys), **sizes)
    return dk, dv


def _check(q_NQD: Tensor, like_q: list[Tensor], lse_NQ: Tensor, column: list[Tensor]) -> None:
    require_tensor("q", q_NQD, (None, None, None), FLOATS)
    rows, heads, dim = q_NQD.shape
    for x in like_q:
        require_tensor("a tensor like q", x, (rows, heads, dim), (q_NQD.dtype,))
    require_tensor("lse", lse_NQ, (rows, heads), (torch.float32,))
    for x in column:
        require_tensor("a key or value", x, (rows, column[0].shape[1], dim), (q_NQD.dtype,))
    require(heads % column[0].shape[1] == 0, "query heads must be a multiple of kv heads")


def _addresses(*parts: list[Tensor]) -> Tensor:
    return torch.tensor([x.data_ptr() for part in parts for x in part]).to(parts[0][0].device, non_blocking=True)


def _launch(q_NQD: Tensor, key_NKD: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    (rows, heads, dim), kv_heads = q_NQD.shape, key_NKD.shape[1]
    groups = heads // kv_heads
    group_block, dim_block = power_of_two(groups), power_of_two(dim)
    block = min(power_of_two(kv_heads), max(1, 2048 // (group_block * dim_block)))
    sizes = {"K": kv_heads, "G": groups, "D": dim, "KB": block, "GB": group_block, "DB": dim_block}
    return (rows, triton.cdiv(kv_heads, block)), sizes | {"num_warps": 4, "num_stages": 1}
