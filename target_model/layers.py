"""Norms, rotary embedding and the dense MLP of MiniMax-M3.

Shapes: T rows, H hidden, I inner width, n heads, D head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from target_model.config import M3Config
from target_model.kernels import ops


def empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A frozen parameter that a checkpoint is to fill."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def rms_norm(x_TH: Tensor, scale_H: Tensor, eps: float) -> Tensor:
    """Gemma's x * rsqrt(mean(x^2) + eps) * scale in fp32, back in the dtype of x; `scale` is 1 + w."""
    return F.rms_norm(x_TH.float(), scale_H.shape, scale_H, eps).to(x_TH.dtype)


class GemmaRMSNorm(nn.Module):
    """The scale of a norm, 1 + w, in fp32."""

    def __init__(self, dim: int):
        super().__init__()
        self.scale = empty(dim, dtype=torch.float32)


class Rotary(nn.Module):
    """Rotate-half RoPE on the first `rotary_dim` dims of a head; the others pass.

    As full-width tables (cosine 1 and sine 0 on the dims that pass, the sine of the first half negated), so that
    applying them is x * cos + x[halves swapped] * sin over whole heads.
    """

    inverse_frequency: Tensor

    def __init__(self, config: M3Config):
        super().__init__()
        self.theta, self.rotary_dim, self.head_dim = config.rope_theta, config.rotary_dim, config.head_dim
        self.register_buffer("inverse_frequency", self._inverse_frequency(), persistent=False)

    def _inverse_frequency(self) -> Tensor:
        return 1.0 / self.theta ** (torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim)

    def reset_table(self) -> None:
        """Fills the table again after `to_empty`."""
        self.inverse_frequency.copy_(self._inverse_frequency())

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, D] in fp32."""
        angles = positions_T[:, None].float() * self.inverse_frequency
        cos, sin = angles.cos(), angles.sin()
        passed = cos.new_ones(cos.shape[0], self.head_dim - self.rotary_dim)
        return torch.cat((cos, cos, passed), dim=-1), torch.cat((-sin, sin, passed * 0), dim=-1)


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
        return ops.mlp(x_TH, self.w13, self.w2, *self.activation)
