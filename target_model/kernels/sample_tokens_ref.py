"""Reference of `sample_tokens`. Shapes: N rows, V vocabulary."""

import torch
from torch import Tensor

from target_model.kernels.gumbel_ref import MASK, philox, to_gumbel


def threshold(x_V: Tensor, top_k: int, top_p: float, min_p: float) -> float:
    """The smallest value of one row that the filters keep."""
    k = top_k if 0 < top_k < len(x_V) else len(x_V)
    best = torch.topk(x_V, k).values
    probability = best.softmax(-1)
    kept = (probability.cumsum(-1) - probability < top_p) & (probability >= min_p * probability[0])
    return float(best[int(kept.sum()) - 1])


def sample_tokens(
    logits_NV: Tensor,
    temperature_N: Tensor,
    top_k_N: Tensor,
    top_p_N: Tensor,
    min_p_N: Tensor,
    seed_N: Tensor,
    choice_N: Tensor,
    position_N: Tensor,
) -> Tensor:
    """The token of every row, int64 [N]. `position_N` is that of the chosen token; `seed_N` holds 64 bits as int64."""
    vocab = logits_NV.shape[1]
    word = torch.arange((vocab + 3) // 4, device=logits_NV.device)[None]
    counter = (word, position_N[:, None], choice_N[:, None], torch.zeros_like(word))
    bits = torch.stack(philox(counter, (seed_N[:, None] & MASK, (seed_N[:, None] >> 32) & MASK)), -1).flatten(1)[
        :, :vocab
    ]
    noise_NV = to_gumbel(bits)
    tokens = []
    for n, row in enumerate(logits_NV.float()):
        if temperature_N[n] == 0:
            tokens.append(row.argmax())
            continue
        x_V = row / temperature_N[n]
        limit = threshold(x_V, int(top_k_N[n]), float(top_p_N[n]), float(min_p_N[n]))
        tokens.append((x_V + noise_NV[n]).masked_fill(x_V < limit, float("-inf")).argmax())
    return torch.stack(tokens)
