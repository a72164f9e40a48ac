"""Reference of `silu_product`. Shapes: T rows, I inner width."""

import torch.nn.functional as F
from torch import Tensor


def silu_product(gate_up_TI: Tensor) -> Tensor:
    """silu(gate) * up, [T, 2I] -> [T, I]."""
    gate, up = gate_up_TI.chunk(2, dim=-1)
    return F.silu(gate) * up
