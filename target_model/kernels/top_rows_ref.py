"""Reference of `top_rows`. Shapes: N rows, V columns, K the best of them."""

import torch
from torch import Tensor

from target_model.kernels.gumbel_ref import for_rows, gumbel_at, gumbel_rows


def top_rows(x_NV: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best k entries of every row: values fp32 [N, k], the largest first, and their columns int64 [N, k], of equal
    values the lowest first; and log sum exp of the whole row, fp32 [N].
    """
    x_NV = x_NV.float()
    vocab = x_NV.shape[1]
    ids_NK = x_NV.topk(min(k + 1, vocab), dim=-1).indices.sort(dim=-1).values
    values_NK, order_NK = x_NV.gather(1, ids_NK).sort(dim=-1, descending=True, stable=True)
    ids_NK = ids_NK.gather(1, order_NK)[:, :k].contiguous()
    if k < vocab:
        # Which of the values that tie across the border torch.topk found is not promised.
        for n in (values_NK[:, k - 1] == values_NK[:, k]).nonzero()[:, 0].tolist():
            ids_NK[n] = x_NV[n].sort(descending=True, stable=True).indices[:k]
    return values_NK[:, :k].contiguous(), ids_NK, torch.logsumexp(x_NV, dim=-1)


def noisy_top_rows(
    x_NV: Tensor,
    k: int,
    scale_R: Tensor,
    seed_R: Tensor,
    choice_R: Tensor,
    position_R: Tensor,
    tokens_V: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`top_rows` of x * scale + the Gumbel noise (see `gumbel_at`) of the columns' tokens, by default their numbers."""
    scale_N, *keys = for_rows(len(x_NV), scale_R, seed_R, choice_R, position_R)
    if tokens_V is None:
        noise_NV = gumbel_rows(*keys, x_NV.shape[1])
    else:
        noise_NV = gumbel_at(*keys, tokens_V.expand(x_NV.shape))
    return top_rows(x_NV.float() * scale_N[:, None] + noise_NV, k)
