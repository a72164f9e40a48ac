"""The activation of a Llama MLP: y[t, i] = silu(x[t, i]) * x[t, I + i], gate and up side by side.

T rows, I inner width. A program takes BLOCK columns of one row; in fp32, rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from target_model.kernels.common import FLOATS, PDL, begin, cdiv, launch_options, require_tensor


@triton.jit
def silu_product_kernel(
    x,  # [T, 2I]
    y,  # [T, I]
    I: tl.constexpr,  # noqa: E741
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + t * 2 * I + i, mask=i < I, other=0.0).to(tl.float32)
    up = tl.load(x + t * 2 * I + I + i, mask=i < I, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + t * I + i, product.to(y.dtype.element_ty), mask=i < I)


@triton.jit
def silu_gradient_kernel(
    x,  # [T, 2I]
    dy,  # [T, I]
    dx,  # [T, 2I]
    I: tl.constexpr,  # noqa: E741
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = t * 2 * I + i
    gate = tl.load(x + at, mask=i < I, other=0.0).to(tl.float32)
    up = tl.load(x + at + I, mask=i < I, other=0.0).to(tl.float32)
    grad = tl.load(dy + t * I + i, mask=i < I, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    tl.store(dx + at, (grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(dx.dtype.element_ty), mask=i < I)
    tl.store(dx + at + I, (grad * gate * sigmoid).to(dx.dtype.element_ty), mask=i < I)


def silu_product(gate_up_TI: Tensor) -> Tensor:
    """silu(gate) * up, [T, 2I] -> [T, I]; differentiable; T any leading dimensions."""
    if gate_up_TI.ndim > 2:
        return silu_product(gate_up_TI.flatten(0, -2)).unflatten(0, gate_up_TI.shape[:-1])
    if gate_up_TI.requires_grad and torch.is_grad_enabled():
        return _SiluProduct.apply(gate_up_TI)
    return _forward(gate_up_TI)


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up_TI):
        ctx.save_for_backward(gate_up_TI)
        return _forward(gate_up_TI)

    @staticmethod
    def backward(ctx, grad_TI):
        (gate_up_TI,) = ctx.saved_tensors
        grad_TI, out = grad_TI.contiguous(), torch.empty_like(gate_up_TI)
        rows, width = grad_TI.shape
        if rows:
            silu_gradient_kernel[(rows, cdiv(width, 1024))](
                gate_up_TI, grad_TI, out, I=width, BLOCK=1024, num_warps=4, num_stages=1
            )
        return out


def _forward(gate_up_TI: Tensor) -> Tensor:
    require_tensor("gate and up", gate_up_TI, (None, None), FLOATS)
    rows, width = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
    y = torch.empty(rows, width, dtype=gate_up_TI.dtype, device=gate_up_TI.device)
    if rows:
        silu_product_kernel[(rows, cdiv(width, 1024))](
            gate_up_TI, y, I=width, BLOCK=1024, PDL=PDL, **launch_options(4, 1)
        )
    return y
