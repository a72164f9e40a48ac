"""Reference of `add_norm` and `dual_norm`. Shapes: T rows, H hidden."""

import torch
import torch.nn.functional as F
from torch import Tensor


def add_norm(x_TH: Tensor, residual_TH: Tensor, scale_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, x + residual), both [T, H] in the dtype of x."""
    total_TH = x_TH + residual_TH
    return F.rms_norm(total_TH.float(), scale_H.shape, scale_H.float(), eps).to(x_TH.dtype), total_TH


def dual_norm(first_TH: Tensor, second_TH: Tensor, first_scale_H: Tensor, second_scale_H: Tensor, eps: float) -> Tensor:
    """Both inputs RMS-normalised, side by side: [T, 2H]."""

    def norm(x_TH: Tensor, scale_H: Tensor) -> Tensor:
        return F.rms_norm(x_TH.float(), scale_H.shape, scale_H.float(), eps).to(x_TH.dtype)

    return torch.cat((norm(first_TH, first_scale_H), norm(second_TH, second_scale_H)), dim=-1)
