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
from target_model.kernels.rope_write import load_halves, rotation, store_halves


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
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_q, is_k, is_v = h < Q, (h >= Q) & (h < Q + K), (h >= Q + K) & (h < Q + 2 * K)
    in_packed = packed + (t * (Q + 2 * K) + h) * (2 * HALF)
    in_q = q + (t * Q + h) * (2 * HALF)
    in_k = k + (t * K + h - Q) * (2 * HALF)
    in_v = v + (t * K + h - Q - K) * (2 * HALF)
    cos, sin = rotation(tl.load(positions + t), frequencies, h < Q + K, HALF)
    if BACKWARD:
        low_q, high_q = load_halves(in_q, is_q, HALF)
        low_k, high_k = load_halves(in_k, is_k, HALF)
        low_v, high_v = load_halves(in_v, is_v, HALF)
        low, high = low_q + low_k + low_v, high_q + high_k + high_v
        store_halves(in_packed, h < Q + 2 * K, low * cos + high * sin, high * cos - low * sin, HALF)
    else:
        low, high = load_halves(in_packed, h < Q + 2 * K, HALF)
        low, high = low * cos - high * sin, high * cos + low * sin
        store_halves(in_q, is_q, low, high, HALF)
        store_halves(in_k, is_k, low, high, HALF)
        store_halves(in_v, is_v, low, high, HALF)


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
