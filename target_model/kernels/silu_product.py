"""The activation of a Llama MLP: y[t, i] = silu(x[t, i]) * x[t, I + i], gate and up side by side.

T rows, I inner width. A program takes BLOCK columns of one row; in fp32, rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from target_model.kernels.common import FLOATS, PDL, cdiv, launch_options, require_tensor


@triton.jit
def silu_product_kernel(
    x,  # [T, 2I]
    y,  # [T, I]
    I: tl.constexpr,  # noqa: E741
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + t * 2 * I + i, mask=i < I, other=0.0).to(tl.float32)
    up = tl.load(x + t * 2 * I + I + i, mask=i < I, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + t * I + i, product.to(y.dtype.element_ty), mask=i < I)


def silu_product(gate_up_TI: Tensor) -> Tensor:
    """silu(gate) * up, [T, 2I] -> [T, I]."""
    require_tensor("gate and up", gate_up_TI, (None, None), FLOATS)
    rows, width = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
    y = torch.empty(rows, width, dtype=gate_up_TI.dtype, device=gate_up_TI.device)
    silu_product_kernel[(rows, cdiv(width, 1024))](gate_up_TI, y, I=width, BLOCK=1024, PDL=PDL, **launch_options(4, 1))
    return y
