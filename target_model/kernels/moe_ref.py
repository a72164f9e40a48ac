"""Reference of `route` and `grouped_experts`. Shapes: T rows, H hidden, E experts, I expert width, N experts of a token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from target_model.layers import clamped_swiglu


def route(x_TH: Tensor, gate_EH: Tensor, bias_E: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Weights fp32 [T, N] and expert ids int64 [T, N]. The bias acts on the choice only; weights sum to `scale`."""
    scores_TE = torch.sigmoid(F.linear(x_TH.float(), gate_EH))
    experts_TN = torch.topk(scores_TE + bias_E, top_k, dim=-1).indices
    weights_TN = scores_TE.gather(-1, experts_TN)
    return weights_TN * (scale / weights_TN.sum(dim=-1, keepdim=True)), experts_TN


def grouped_experts(
    x_TH: Tensor,
    w13_E2IH: Tensor,
    w2_EHI: Tensor,
    weights_TN: Tensor,
    experts_TN: Tensor,
    alpha: float,
    limit: float,
    beta: float,
) -> Tensor:
    """sum over n of weights[t, n] * w2[e] @ swiglu(w13[e] @ x[t]), e = experts[t, n]: [T, H] in the dtype of x."""
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    for expert in experts_TN.unique().tolist():
        rows, ranks = (experts_TN == expert).nonzero(as_tuple=True)
        inner = clamped_swiglu(F.linear(x_TH[rows], w13_E2IH[expert]), alpha, limit, beta)
        out_TH.index_add_(0, rows, F.linear(inner, w2_EHI[expert]).float() * weights_TN[rows, ranks, None])
    return out_TH.to(x_TH.dtype)
