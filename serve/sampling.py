"""From the target's logits to tokens: bias, penalties and filters per row, then argmax with the position's noise.

With a top-k in force only the best k entries of a row are touched behind the first pass over it (`Survivors`).

Rejection sampling is the alternative: the draft then knows nothing of the noise, and a seed repeats a text only with
the same draft and tree.

N rows (nodes of all sequences), V vocabulary, W candidates of a node, K the largest top-k of the rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from serve.request import SamplingParams, Sequence


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
    best = Survivors.of(logits_NV, [row.sequence.params for row in rows])
    if best is None:
        return (filtered(logits_NV, rows) + noise_NV).argmax(-1)
    noisy_NK = best.values_NK + noise_NV.gather(1, best.ids_NK)
    # As argmax over the vocabulary would: of equal values the lowest id.
    return best.ids_NK.masked_fill(noisy_NK < noisy_NK.amax(-1, keepdim=True), logits_NV.shape[-1]).amin(-1)


def choose_by_rejection(
    logits_NV: Tensor,
    rows: list[Row],
    noise_NV: Tensor,
    eos_ids: tuple[int, ...],
    candidate_NW: Tensor,
    uniform_NW: Tensor,
) -> Tensor:
    """The token of every row, int64 [N], by rejection sampling over the tokens that the draft proposed there.

    Candidates (-1 behind the last) were picked without chance, so each stands for a draft that is sure of it: it is
    accepted with its probability p under what is left of the target's distribution; if not, its mass is removed and
    the next one is tried. After the last the token comes from the rest.
    """
    logits_NV = adjust(logits_NV, rows, eos_ids)
    rest_NV = filtered(logits_NV, rows).softmax(-1)
    chosen_N = torch.full_like(candidate_NW[:, 0], -1)
    for candidate_N, uniform_N in zip(candidate_NW.unbind(1), uniform_NW.unbind(1), strict=True):
        tried_N = (candidate_N >= 0) & (chosen_N < 0)
        index_N1 = candidate_N.clamp(min=0)[:, None]
        mass_N = rest_NV.gather(1, index_N1)[:, 0]
        # Summed anew each time: when nothing else is left the two are equal, and the candidate is accepted for sure.
        accepted_N = tried_N & (uniform_N * rest_NV.sum(-1) < mass_N)
        chosen_N = torch.where(accepted_N, candidate_N, chosen_N)
        rest_NV.scatter_(1, index_N1, torch.where(tried_N & ~accepted_N, 0.0, mass_N)[:, None])
    rest_N = (rest_NV.log() + noise_NV).argmax(-1)
    greedy_N = torch.tensor([row.sequence.params.greedy for row in rows], device=logits_NV.device)
    return torch.where(greedy_N, logits_NV.argmax(-1), torch.where(chosen_N >= 0, chosen_N, rest_N))


def adjust(logits_NV: Tensor, rows: list[Row], eos_ids: tuple[int, ...]) -> Tensor:
    """Logits after grammar, bias, penalties and the ban on ending early; the input itself when no row asks for any."""
    logits_NV = follow_grammars(logits_NV, rows)
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


def follow_grammars(logits_NV: Tensor, rows: list[Row], token_ids: Tensor | None = None) -> Tensor:
    """Logits with everything at -inf that a row's grammar forbids behind its path; the input itself when no row has a
    grammar. `token_ids` [V] are the tokens of the columns, by default their numbers.
    """
    bound: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        if row.sequence.constraint is not None:
            bound.setdefault(id(row.sequence), []).append(index)
    if not bound:
        return logits_NV
    masks = []
    for indices in bound.values():
        sequence = rows[indices[0]].sequence
        answer = sequence.token_ids[sequence.prompt_length :]
        masks.append(sequence.constraint.masks(answer, [rows[index].path for index in indices]))
    words_BW = torch.cat(masks).to(logits_NV.device)
    allowed_BV = ((words_BW[:, :, None] >> torch.arange(32, device=words_BW.device)) & 1).flatten(1).bool()
    allowed_BV = allowed_BV[:, : logits_NV.shape[-1]] if token_ids is None else allowed_BV[:, token_ids]
    rows_B = [index for indices in bound.values() for index in indices]
    logits_NV = logits_NV.clone()
    logits_NV[rows_B] = logits_NV[rows_B].masked_fill(~allowed_BV, float("-inf"))
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


@dataclass(frozen=True)
class Survivors:
    """What top-k, top-p and min-p leave of each row: values_NK are logits / temperature, the largest first, and -inf
    from the first one on that is filtered out; ids_NK are the entries they stand at.
    """

    values_NK: Tensor
    ids_NK: Tensor

    @staticmethod
    def of(logits_NV: Tensor, params: list[SamplingParams], *, split_ties: bool = False) -> "Survivors | None":
        """None when some row has no top-k, or when entries tie across a row's top-k: such entries stay together, and
        only `filtered` can keep them all. Who only guesses may split them.
        """
        vocab, device = logits_NV.shape[-1], logits_NV.device
        limits = _limits(params, vocab)
        largest = max(limits)
        if largest == vocab:
            return None
        top = logits_NV.topk(largest + 1, dim=-1)
        scaled_NK = top.values / _column(_temperatures(params), device)
        limit_N1 = _column(limits, device)
        if not split_ties and bool((scaled_NK.gather(1, limit_N1 - 1) == scaled_NK.gather(1, limit_N1)).any()):
            return None
        scaled_NK = scaled_NK[:, :largest]
        threshold_N1 = _threshold(scaled_NK, limit_N1, params)
        return Survivors(scaled_NK.masked_fill(scaled_NK < threshold_N1, float("-inf")), top.indices[:, :largest])


def filtered(logits_NV: Tensor, rows: list[Row]) -> Tensor:
    """logits / temperature with everything outside top-k, top-p and min-p at -inf; greedy rows keep only their best
    token.

    Every filter is a threshold on the value, so equal values stay or go together and no tie depends on a sort.
    """
    params, vocab = [row.sequence.params for row in rows], logits_NV.shape[-1]
    scaled_NV = logits_NV / _column(_temperatures(params), logits_NV.device)
    limits = _limits(params, vocab)
    if min(limits) == vocab and all(p.top_p == 1 and p.min_p == 0 for p in params):
        return scaled_NV
    # Only as many sorted values as the largest top-k asks for: with top-k on, nothing is sorted over the vocabulary.
    sorted_NK = scaled_NV.topk(max(limits), dim=-1).values
    threshold_N1 = _threshold(sorted_NK, _column(limits, logits_NV.device), params)
    return scaled_NV.masked_fill(scaled_NV < threshold_N1, float("-inf"))


def _threshold(sorted_NK: Tensor, limit_N1: Tensor, params: list[SamplingParams]) -> Tensor:
    """The smallest value [N, 1] that top-k (the limit), top-p and min-p keep, of values in descending order."""
    count, device = sorted_NK.shape[-1], sorted_NK.device
    if any(p.greedy or p.top_k != params[0].top_k for p in params):
        sorted_NK = sorted_NK.masked_fill(torch.arange(count, device=device) >= limit_N1, float("-inf"))
    probability_NK = sorted_NK.softmax(-1)
    top_p_N1 = _column([p.top_p for p in params], device)
    kept_NK = (probability_NK.cumsum(-1) - probability_NK < top_p_N1) & (sorted_NK > float("-inf"))
    if any(p.min_p for p in params):
        kept_NK &= probability_NK >= _column([p.min_p for p in params], device) * probability_NK[:, :1]
    return sorted_NK.gather(1, kept_NK.sum(-1, keepdim=True) - 1)


def _limits(params: list[SamplingParams], vocab: int) -> list[int]:
    return [1 if p.greedy else min(p.top_k or vocab, vocab) for p in params]


def _temperatures(params: list[SamplingParams]) -> list[float]:
    return [1.0 if p.greedy else p.temperature for p in params]


def _column(values: list[float] | list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)[:, None]
