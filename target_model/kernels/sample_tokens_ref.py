"""Reference of `sample_tokens`. Shapes: N rows, V vocabulary, K the most entries that a top-k leaves."""

import torch
from torch import Tensor

from target_model.kernels.gumbel_ref import for_rows, gumbel_at, gumbel_rows


def filter_sorted(sorted_NK: Tensor, limit_N1: Tensor, top_p_N1: Tensor, min_p_N1: Tensor) -> Tensor:
    """Values in descending order, -inf from the first one on that top-k (the limit), top-p or min-p leaves out."""
    rank_K = torch.arange(sorted_NK.shape[-1], device=sorted_NK.device)
    sorted_NK = sorted_NK.masked_fill(rank_K >= limit_N1, float("-inf"))
    probability_NK = sorted_NK.softmax(-1)
    # Without top-p nothing is cut, also where the sum rounds to 1 early.
    kept_NK = (probability_NK.cumsum(-1) - probability_NK < top_p_N1) | (top_p_N1 >= 1)
    kept_NK &= probability_NK >= min_p_N1 * probability_NK[..., :1]
    return sorted_NK.masked_fill(~kept_NK, float("-inf"))


def smallest_kept(sorted_NK: Tensor, limit_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """The smallest value [N, 1] that top-k (the limit), top-p and min-p keep, of values in descending order."""
    kept_NK = filter_sorted(sorted_NK, limit_N[:, None], top_p_N[:, None], min_p_N[:, None])
    return kept_NK.gather(1, (kept_NK > float("-inf")).sum(-1, keepdim=True).clamp(min=1) - 1)


def thresholds(x_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """The smallest value of every row that its filters keep, [N, 1]; -inf where it has none."""
    vocab = x_NV.shape[1]
    limit_N = torch.where((top_k_N > 0) & (top_k_N < vocab), top_k_N, vocab).long()
    filters_N = (limit_N < vocab) | (top_p_N < 1) | (min_p_N > 0)
    if not filters_N.any():
        return torch.full_like(x_NV[:, :1], float("-inf"))
    # Only as many sorted values as the largest top-k asks for: with top-k on, nothing is sorted over the vocabulary.
    sorted_NK = x_NV.topk(int(torch.where(filters_N, limit_N, 1).max()), dim=-1).values
    least_N1 = smallest_kept(sorted_NK, limit_N, top_p_N, min_p_N)
    return least_N1.masked_fill(~filters_N[:, None], float("-inf"))


def sample_tokens(
    logits_NV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    choice_R: Tensor,
    position_N: Tensor,
) -> Tensor:
    """The token of every row, int64 [N], in the N positions; each of the R settings is for N / R consecutive rows.

    fp32 temperature (0: greedy), int32 top_k (0: off), fp32 top_p and min_p, int64 seed (64 bits), choice and position.
    """
    settings = for_rows(len(logits_NV), temperature_R, top_k_R, top_p_R, min_p_R, seed_R, choice_R)
    temperature_N, top_k_N, top_p_N, min_p_N, seed_N, choice_N = settings
    greedy_N = temperature_N == 0
    x_NV = logits_NV.float() / torch.where(greedy_N, 1.0, temperature_N)[:, None]
    kept_NV = x_NV >= thresholds(x_NV, torch.where(greedy_N, 1, top_k_N), top_p_N, min_p_N)
    if 16 * kept_NV.sum() <= kept_NV.numel():  # the noise of a whole row is cheaper by the token
        n, v = kept_NV.nonzero(as_tuple=True)
        drawn = gumbel_at(seed_N[n], choice_N[n], position_N[n], v[:, None])[:, 0]
        noisy = x_NV[n, v] + drawn.masked_fill(greedy_N[n], 0.0)
        return torch.full_like(x_NV, float("-inf")).index_put_((n, v), noisy).argmax(-1)
    noise_NV = gumbel_rows(seed_N, choice_N, position_N, x_NV.shape[1]).masked_fill(greedy_N[:, None], 0.0)
    return torch.where(kept_NV, x_NV + noise_NV, float("-inf")).argmax(-1)
