"""Queries, keys and values of the packed projection, in training: rotated like in serving, with a gradient.

    q, k: x[t, h] rotated by the angles position[t] * frequency (rotate-half over the whole head);  v as it is
T rows, Q query heads, K kv heads, n = Q + 2 K packed heads in the order q | k | v, D head dim. A program takes BLOCK_H
heads of one row; in fp32, rounded once. The gradient is the rotation back, from three tensors into one. Head dims that
are no power of two take the reference.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from target_model.kernels import rotate_heads_ref
from target_model.kernels.common import FLOATS, cdiv, power_of_two, require_tensor


@triton.jit
def rotate_heads_kernel(
    packed,  # [T, n, D], written with BACKWARD
    positions,  # int64 [T]
    frequencies,  # fp32 [D / 2]
    q,  # [T, Q, D], read with BACKWARD, as are k and v [T, K, D]
    k,
    v,
    Q: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    BLOCK_H: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    i = tl.arange(0, HALF)[None, :]
    is_q, is_k, is_v = h < Q, (h >= Q) & (h < Q + K), (h >= Q + K) & (h < Q + 2 * K)
    in_packed = packed + (t * (Q + 2 * K) + h) * (2 * HALF) + i
    in_q = q + (t * Q + h) * (2 * HALF) + i
    in_k = k + (t * K + h - Q) * (2 * HALF) + i
    in_v = v + (t * K + h - Q - K) * (2 * HALF) + i
    angle = tl.load(positions + t).to(tl.float32) * tl.load(frequencies + i)
    cos = tl.where(is_v, 1.0, tl.cos(angle))
    sin = tl.where(is_v, 0.0, tl.sin(angle))
    if BACKWARD:
        first = tl.load(in_q, mask=is_q, other=0.0).to(tl.float32)
        first += tl.load(in_k, mask=is_k, other=0.0) + tl.load(in_v, mask=is_v, other=0.0)
        second = tl.load(in_q + HALF, mask=is_q, other=0.0).to(tl.float32)
        second += tl.load(in_k + HALF, mask=is_k, other=0.0) + tl.load(in_v + HALF, mask=is_v, other=0.0)
        tl.store(in_packed, (first * cos + second * sin).to(packed.dtype.element_ty), mask=h < Q + 2 * K)
        tl.store(in_packed + HALF, (second * cos - first * sin).to(packed.dtype.element_ty), mask=h < Q + 2 * K)
    else:
        first = tl.load(in_packed, mask=h < Q + 2 * K, other=0.0).to(tl.float32)
        second = tl.load(in_packed + HALF, mask=h < Q + 2 * K, other=0.0).to(tl.float32)
        low = (first * cos - second * sin).to(q.dtype.element_ty)
        high = (second * cos + first * sin).to(q.dtype.element_ty)
        tl.store(in_q, low, mask=is_q)
        tl.store(in_q + HALF, high, mask=is_q)
        tl.store(in_k, low, mask=is_k)
        tl.store(in_k + HALF, high, mask=is_k)
        tl.store(in_v, low, mask=is_v)
        tl.store(in_v + HALF, high, mask=is_v)


def rotate_heads(
    packed_TnD: Tensor, positions_T: Tensor, frequencies_F: Tensor, num_heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, Q, D], k and v [T, K, D], differentiable in `packed`; T any leading dimensions."""
    dim = packed_TnD.shape[-1]
    if dim != power_of_two(dim):
        return rotate_heads_ref.rotate_heads(packed_TnD, positions_T, frequencies_F, num_heads, kv_heads)
    return _RotateHeads.apply(packed_TnD, positions_T, frequencies_F, num_heads, kv_heads)


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed, positions, frequencies, num_heads, kv_heads):
        lead, dim = packed.shape[:-2], packed.shape[-1]
        require_tensor("packed", packed.flatten(0, -3), (None, num_heads + 2 * kv_heads, dim), FLOATS)
        require_tensor("positions", positions.flatten(), (lead.numel(),), (torch.int64,))
        require_tensor("frequencies", frequencies, (dim // 2,), (torch.float32,))
        parts = [packed.new_empty(*lead, count, dim) for count in (num_heads, kv_heads, kv_heads)]
        ctx.save_for_backward(positions, frequencies)
        _launch(packed, positions, frequencies, *parts, backward=False)
        return tuple(parts)

    @staticmethod
    def backward(ctx, *grads):
        q, k, v = (grad.contiguous() for grad in grads)
        packed = q.new_empty(*q.shape[:-2], q.shape[-2] + 2 * k.shape[-2], q.shape[-1])
        _launch(packed, *ctx.saved_tensors, q, k, v, backward=True)
        return packed, None, None, None, None


def _launch(packed: Tensor, positions: Tensor, frequencies: Tensor, q: Tensor, k: Tensor, v: Tensor, backward: bool):
    heads, dim = packed.shape[-2:]
    if positions.numel():
        rotate_heads_kernel[(positions.numel(), cdiv(heads, 16))](
            packed, positions, frequencies, q, k, v, Q=q.shape[-2], K=k.shape[-2], HALF=dim // 2, BLOCK_H=16,
            BACKWARD=backward, num_warps=4, num_stages=1,
        )  # fmt: skip
