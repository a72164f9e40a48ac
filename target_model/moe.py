"""The mixture of experts of one layer. Shapes: T rows, H hidden, E experts, I expert width, N experts of a token."""

import torch
from torch import Tensor, nn

from target_model.config import M3Config
from target_model.kernels import ops
from target_model.layers import DenseMLP, empty


class MixtureOfExperts(nn.Module):
    """Sigmoid routing with a selection bias, the chosen experts, and one shared expert that every token passes.

    `gate` [E, H] and `gate_bias` [E] stay in fp32; `w13` [E, 2I, H] stacks gate and up of each expert, `w2` [E, H, I]
    is down.
    """

    def __init__(self, config: M3Config, dtype: torch.dtype):
        super().__init__()
        experts, width, hidden = config.num_experts, config.expert_width, config.hidden_size
        self.routing = (config.experts_per_token, config.routed_scaling_factor)
        self.activation = (config.swiglu_alpha, config.swiglu_limit, config.swiglu_beta)
        self.gate = empty(experts, hidden, dtype=torch.float32)
        self.gate_bias = empty(experts, dtype=torch.float32)
        self.w13 = empty(experts, 2 * width, hidden, dtype=dtype)
        self.w2 = empty(experts, hidden, width, dtype=dtype)
        self.shared = DenseMLP(config, config.shared_width, dtype)

    def forward(self, x_TH: Tensor) -> Tensor:
        weights_TN, experts_TN = ops.route(x_TH, self.gate, self.gate_bias, *self.routing)
        shared = self.shared.w13, self.shared.w2
        return ops.grouped_experts(x_TH, self.w13, self.w2, weights_TN, experts_TN, *self.activation, shared=shared)
