"""Norms, rotary embedding and the dense MLP of MiniMax-M3.

Shapes: T rows, H hidden, I inner width, n heads, D head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from target_model.config import M3Config


def empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A frozen parameter that a checkpoint is to fill."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def rms_norm(x_TH: Tensor, scale_H: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * scale in fp32, back in the dtype of x. Gemma's norm: `scale` is 1 + w, kept in
    fp32.
    """
    return F.rms_norm(x_TH.float(), scale_H.shape, scale_H, eps).to(x_TH.dtype)


class GemmaRMSNorm(nn.Module):
    """`rms_norm` with its own scale."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.scale = empty(dim, dtype=torch.float32)

    def forward(self, x_TH: Tensor) -> Tensor:
        return rms_norm(x_TH, self.scale, self.eps)


class Rotary(nn.Module):
    """Rotate-half RoPE on the first `rotary_dim` dims of a head; the others pass.

    Kept as full-width tables (cosine 1 and sine 0 on the dims that pass, the sine of the first half negated), so that
    applying it is x * cos + x[swapped halves] * sin over whole heads.
    """

    inverse_frequency: Tensor
    swapped: Tensor

    def __init__(self, config: M3Config):
        super().__init__()
        self.theta, self.rotary_dim, self.head_dim = config.rope_theta, config.rotary_dim, config.head_dim
        inverse_frequency, swapped = self._tables()
        self.register_buffer("inverse_frequency", inverse_frequency, persistent=False)
        self.register_buffer("swapped", swapped, persistent=False)

    def _tables(self) -> tuple[Tensor, Tensor]:
        half = self.rotary_dim // 2
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        order = torch.arange(self.head_dim)
        return 1.0 / self.theta**exponents, torch.cat((order[half : 2 * half], order[:half], order[2 * half :]))

    def reset_tables(self) -> None:
        """Fills the tables again after `to_empty`."""
        for buffer, table in zip((self.inverse_frequency, self.swapped), self._tables(), strict=True):
            buffer.copy_(table)

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, D] in fp32, as `rotate` takes them."""
        angles = positions_T[:, None].float() * self.inverse_frequency
        cos, sin = angles.cos(), angles.sin()
        passed = cos.new_ones(cos.shape[0], self.head_dim - self.rotary_dim)
        cos_TD = torch.cat((cos, cos, passed), dim=-1)
        sin_TD = torch.cat((-sin, sin, passed * 0), dim=-1)
        return cos_TD[:, None], sin_TD[:, None]

    def rotate(self, x_TnD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        """Rotates every head of every row."""
        return torch.addcmul(x_TnD * cos_T1D, x_TnD.index_select(-1, self.swapped), sin_T1D)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float, beta: float) -> Tensor:
    """gate * sigmoid(alpha * gate) * (up + beta), the gate clamped from above only, up on both sides. [.., 2I] -> [..,
    I].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


class DenseMLP(nn.Module):
    """The MLP of the dense layers, and the shared expert of the MoE layers. `w13` [2I, H] stacks gate and up, `w2` [H,
    I] is down.
    """

    def __init__(self, config: M3Config, width: int, dtype: torch.dtype):
        super().__init__()
        self.activation = (config.swiglu_alpha, config.swiglu_limit, config.swiglu_beta)
        self.w13 = empty(2 * width, config.hidden_size, dtype=dtype)
        self.w2 = empty(config.hidden_size, width, dtype=dtype)

    def forward(self, x_TH: Tensor) -> Tensor:
        return F.linear(clamped_swiglu(F.linear(x_TH, self.w13), *self.activation), self.w2)
