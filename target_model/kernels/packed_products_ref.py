"""Reference of `linear` and `mlp`, for packed and plain weights.

Shapes: T rows, K columns, N outputs, H hidden, I inner width.
"""

from torch import Tensor

from target_model.layers import clamped_swiglu
from target_model.quantised import QuantisedWeight, linear

__all__ = ["linear", "mlp"]


def mlp(
    x_TH: Tensor,
    w13_2IH: Tensor | QuantisedWeight,
    w2_HI: Tensor | QuantisedWeight,
    alpha: float,
    limit: float,
    beta: float,
) -> Tensor:
    """w2 swiglu(w13 x): [T, H]."""
    return linear(clamped_swiglu(linear(x_TH, w13_2IH), alpha, limit, beta), w2_HI)
