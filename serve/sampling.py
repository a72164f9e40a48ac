"""From the target's logits to tokens: bias, penalties and filters per row, then argmax with the position's noise.

N rows (nodes of all sequences), V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from serve.request import Sequence


@dataclass(frozen=True)
class Row:
    """One row of logits: the sequence it belongs to, and the decided or guessed tokens between that sequence's and the
    row's choice.
    """

    sequence: Sequence
    path: tuple[int, ...]

    @property
    def position(self) -> int:
        """Position of the token that this row chooses."""
        return len(self.sequence.token_ids) + len(self.path)


def choose(logits_NV: Tensor, rows: list[Row], noise_NV: Tensor | None, eos_ids: tuple[int, ...]) -> Tensor:
    """The target's token of every row, int64 [N]. `noise_NV` is 0 on greedy rows, None when all are greedy."""
    logits_NV = adjust(logits_NV, rows, eos_ids)
    if noise_NV is None:
        return logits_NV.argmax(-1)
    return (filtered(logits_NV, rows) + noise_NV).argmax(-1)


def adjust(logits_NV: Tensor, rows: list[Row], eos_ids: tuple[int, ...]) -> Tensor:
    """Logits after bias, penalties and the ban on ending early; the input itself when no row asks for any."""
    if not any(_adjusts(row) for row in rows):
        return logits_NV
    logits_NV = logits_NV.clone()
    for logits_V, row in zip(logits_NV, rows, strict=True):
        params = row.sequence.params
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=logits_V.device)
            logits_V[ids] += torch.tensor(list(params.logit_bias.values()), device=logits_V.device)
        if params.uses_history:
            _penalise(logits_V, row)
        if row.position - row.sequence.prompt_length < params.min_tokens:
            banned = list(params.stop_token_ids) + ([] if params.ignore_eos else list(eos_ids))
            logits_V[banned] = float("-inf")
    return logits_NV


def _adjusts(row: Row) -> bool:
    params = row.sequence.params
    return (
        bool(params.logit_bias) or params.uses_history or row.position - row.sequence.prompt_length < params.min_tokens
    )


def _penalise(logits_V: Tensor, row: Row) -> None:
    """In place. Repetition divides positive logits and multiplies negative ones of every token seen; the others
    subtract.
    """
    params, sequence = row.sequence.params, row.sequence
    history = torch.tensor([*sequence.token_ids, *row.path], device=logits_V.device)
    if params.repetition_penalty != 1:
        seen = history.unique()
        value = logits_V[seen]
        logits_V[seen] = torch.where(value > 0, value / params.repetition_penalty, value * params.repetition_penalty)
    tokens, counts = history[sequence.prompt_length :].unique(return_counts=True)
    logits_V[tokens] -= params.frequency_penalty * counts + params.presence_penalty


def filtered(logits_NV: Tensor, rows: list[Row]) -> Tensor:
    """logits / temperature with everything outside top-k, top-p and min-p at -inf; greedy rows keep only their best
    token.

    Every filter is a threshold on the value, so equal values stay or go together and no tie depends on a sort.
    """
    params = [row.sequence.params for row in rows]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits_NV.device)[:, None]

    vocab = logits_NV.shape[-1]
    scaled_NV = logits_NV / column([1.0 if p.greedy else p.temperature for p in params])
    limits = [1 if p.greedy else min(p.top_k or vocab, vocab) for p in params]
    top_p, min_p = [p.top_p for p in params], [p.min_p for p in params]
    if min(limits) == vocab and min(top_p) == 1 and max(min_p) == 0:
        return scaled_NV
    # Only as many sorted values as the largest top-k asks for: with top-k on, nothing is sorted over the vocabulary.
    sorted_NK = scaled_NV.topk(max(limits), dim=-1).values
    limit_N1 = column(limits).long()
    sorted_NK = sorted_NK.masked_fill(torch.arange(max(limits), device=logits_NV.device) >= limit_N1, float("-inf"))
    probability_NK = sorted_NK.softmax(-1)
    kept_NK = (probability_NK.cumsum(-1) - probability_NK < column(top_p)) & (sorted_NK > float("-inf"))
    kept_NK &= probability_NK >= column(min_p) * probability_NK[:, :1]
    threshold_N1 = sorted_NK.gather(1, kept_NK.sum(-1, keepdim=True) - 1)
    return scaled_NV.masked_fill(scaled_NV < threshold_N1, float("-inf"))
