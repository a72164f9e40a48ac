"""Reference of `merge_column` and `column_gradient`. Shapes as there, with [N, K, G, D] for query heads by kv head."""

import torch
from torch import Tensor


def merge_column(
    q_NQD: Tensor, part_NQD: Tensor, lse_NQ: Tensor, keys: list[Tensor], values: list[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """(attention over the other keys and the column [N, Q, D], its log-sum-exp fp32 [N, Q])."""
    q, part, lse = (_by_group(x, keys[0]) for x in (q_NQD.float(), part_NQD, lse_NQ))
    scores = torch.stack([(q * k[:, :, None]).sum(-1) * scale for k in keys], dim=-1)
    merged_lse = torch.logaddexp(lse, scores.logsumexp(-1))
    out = part * (lse - merged_lse).exp()[..., None]
    for score, v in zip(scores.unbind(-1), values, strict=True):
        out.addcmul_((score - merged_lse).exp()[..., None], v[:, :, None])
    return out.flatten(1, 2).to(q_NQD.dtype), merged_lse.flatten(1, 2)


def column_gradient(
    grad_NQD: Tensor,
    q_NQD: Tensor,
    out_NQD: Tensor,
    lse_NQ: Tensor,
    dq_NQD: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    scale: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of keys and values; that of q is added to `dq`."""
    q, grad, total = (_by_group(x.float(), keys[0]) for x in (q_NQD, grad_NQD, dq_NQD))
    lse = _by_group(lse_NQ, keys[0])
    expected = (grad * _by_group(out_NQD, keys[0])).sum(-1)
    dk, dv = [], []
    for k, v in zip(keys, values, strict=True):
        weight = ((q * k[:, :, None]).sum(-1) * scale - lse).exp()
        d_score = (weight * ((grad * v[:, :, None]).sum(-1) - expected) * scale)[..., None]
        dk.append((d_score * q).sum(2).to(k.dtype))
        dv.append((weight[..., None] * grad).sum(2).to(v.dtype))
        total = total + d_score * k[:, :, None]
    dq_NQD.copy_(total.flatten(1, 2))
    return dk, dv


def _by_group(x: Tensor, key_NKD: Tensor) -> Tensor:
    """[N, Q, ...] as [N, K, G, ...]."""
    return x.unflatten(1, (key_NKD.shape[1], -1))
