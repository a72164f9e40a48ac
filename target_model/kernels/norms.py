"""Row norms fused with what stands beside them. One program a row; sums in fp32.

    add_norm:  r = x + residual;  y = r * rsqrt(mean(r^2) + eps) * scale              (the target's norms: scale = 1 +
               w)
    dual_norm: out = [ e * rsqrt(mean(e^2) + eps) * a | f * rsqrt(mean(f^2) + eps) * b ]   (input of the draft's
    attention)
T rows, H hidden (any size up to 16384).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from target_model.kernels.common import FLOATS, PDL, begin, launch_options, power_of_two, require_tensor


@triton.jit
def add_norm_kernel(
    x,  # [T, H]
    residual,  # [T, H]
    scale,  # [H]
    total,  # [T, H] x + residual
    normed,  # [T, H]
    eps,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    at = tl.program_id(0).to(tl.int64) * H
    h = tl.arange(0, WIDTH)
    a = tl.load(x + at + h, mask=h < H, other=0.0).to(tl.float32)
    b = tl.load(residual + at + h, mask=h < H, other=0.0).to(tl.float32)
    summed = (a + b).to(total.dtype.element_ty)
    tl.store(total + at + h, summed, mask=h < H)
    wide = summed.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    y = wide * inverse * tl.load(scale + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(normed + at + h, y.to(normed.dtype.element_ty), mask=h < H)


@triton.jit
def dual_norm_kernel(
    first,  # [T, H]
    second,  # [T, H]
    first_scale,  # [H]
    second_scale,  # [H]
    out,  # [T, 2H]
    eps,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, WIDTH)
    source, scale = first, first_scale
    if tl.program_id(1) == 1:
        source, scale = second, second_scale
    x = tl.load(source + t * H + h, mask=h < H, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    y = x * inverse * tl.load(scale + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(out + t * 2 * H + tl.program_id(1) * H + h, y.to(out.dtype.element_ty), mask=h < H)


def add_norm(x_TH: Tensor, residual_TH: Tensor, scale_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, x + residual), both [T, H] in the dtype of x."""
    rows, hidden = x_TH.shape
    require_tensor("x", x_TH, (None, None), FLOATS)
    require_tensor("residual", residual_TH, (rows, hidden), (x_TH.dtype,))
    require_tensor("scale", scale_H, (hidden,), FLOATS)
    normed, total = torch.empty_like(x_TH), torch.empty_like(x_TH)
    add_norm_kernel[(rows,)](
        x_TH,
        residual_TH,
        scale_H,
        total,
        normed,
        eps,
        H=hidden,
        WIDTH=power_of_two(hidden),
        PDL=PDL,
        **launch_options(8, 1),
    )
    return normed, total


def dual_norm(first_TH: Tensor, second_TH: Tensor, first_scale_H: Tensor, second_scale_H: Tensor, eps: float) -> Tensor:
    """Both inputs RMS-normalised, side by side: [T, 2H]."""
    rows, hidden = first_TH.shape
    require_tensor("first", first_TH, (None, None), FLOATS)
    require_tensor("second", second_TH, (rows, hidden), (first_TH.dtype,))
    for name, scale in (("first_scale", first_scale_H), ("second_scale", second_scale_H)):
        require_tensor(name, scale, (hidden,), FLOATS)
    out = torch.empty(rows, 2 * hidden, dtype=first_TH.dtype, device=first_TH.device)
    dual_norm_kernel[(rows, 2)](
        first_TH, second_TH, first_scale_H, second_scale_H, out, eps, H=hidden, WIDTH=power_of_two(hidden), PDL=PDL,
        **launch_options(8, 1),
    )  # fmt: skip
    return out
