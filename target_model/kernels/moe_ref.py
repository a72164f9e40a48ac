"""Reference of `route` and `grouped_experts`. Shapes: T rows, H hidden, E experts, I expert width, N experts of a
token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from target_model.kernels.packed_products_ref import mlp
from target_model.layers import clamped_swiglu
from target_model.quantised import QuantisedWeight, expert_weight


def route(x_TH: Tensor, gate_EH: Tensor, bias_E: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Weights fp32 [T, N] and expert ids int64 [T, N]. The bias acts on the choice only; weights sum to `scale`."""
    scores_TE = torch.sigmoid(F.linear(x_TH.float(), gate_EH))
    experts_TN = torch.topk(scores_TE + bias_E, top_k, dim=-1).indices
    weights_TN = scores_TE.gather(-1, experts_TN)
    return weights_TN * (scale / weights_TN.sum(dim=-1, keepdim=True)), experts_TN


def grouped_experts(
    x_TH: Tensor,
    w13_E2IH: Tensor | QuantisedWeight,
    w2_EHI: Tensor | QuantisedWeight,
    weights_TN: Tensor,
    experts_TN: Tensor,
    alpha: float,
    limit: float,
    beta: float,
    routed_over: int | None = None,
    shared: tuple[Tensor | QuantisedWeight, Tensor | QuantisedWeight] | None = None,
) -> Tensor:
    """sum over n of weights[t, n] * w2[e] @ swiglu(w13[e] @ x[t]), e = experts[t, n]: [T, H] in the dtype of x.

    An expert id of E stands for an expert that is not here: the pair is left out. `routed_over`: for kernels only.
    `shared`: w13 and w2 of an expert that every row passes with the weight 1.
    """
    common = 0 if shared is None else mlp(x_TH, *shared, alpha, limit, beta)
    # Pairs (row, rank) sorted by expert: one product for each expert that was chosen, one activation for all.
    counts = experts_TN.flatten().bincount(minlength=w13_E2IH.shape[0]).tolist()[: w13_E2IH.shape[0]]
    if not any(counts):
        return torch.zeros_like(x_TH) + common
    order = experts_TN.flatten().argsort(stable=True)[: sum(counts)]
    rows = order // experts_TN.shape[1]
    inner = clamped_swiglu(_per_expert(x_TH[rows], w13_E2IH, counts), alpha, limit, beta)
    out = _per_expert(inner, w2_EHI, counts).float() * weights_TN.flatten()[order, None]
    return torch.zeros_like(x_TH, dtype=torch.float32).index_add_(0, rows, out).to(x_TH.dtype) + common


def _per_expert(x: Tensor, weight_E: Tensor | QuantisedWeight, counts: list[int]) -> Tensor:
    """The first counts[0] rows of x times weight[0], the next counts[1] times weight[1], ..."""
    parts = x.split(counts)
    return torch.cat([F.linear(part, expert_weight(weight_E, e, x.dtype)) for e, part in enumerate(parts) if counts[e]])
