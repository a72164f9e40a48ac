"""From the target's logits to tokens: bias, penalties and filters per row, then argmax with the position's noise.

The choice itself is `ops.sample_tokens`: filters, the noise of what they leave, argmax.

Rejection sampling is the alternative: the draft then knows nothing of the noise, and a seed repeats a text only with
the same draft and tree.

N rows (nodes of all sequences), V vocabulary, W candidates of a node, K the largest top-k of the rows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from serve.request import SamplingParams, Sequence
from target_model.batch import signed64
from target_model.kernels import ops
from target_model.kernels.sample_tokens_ref import smallest_kept, thresholds

MAX_TOP_K = 2**31 - 1  # on the device; no vocabulary is as large


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

    @property
    def integers(self) -> tuple[int, int, int, int]:
        """Seed, choice index, position and top-k, as `RowSettings` has them."""
        sequence = self.sequence
        top_k = min(sequence.params.top_k, MAX_TOP_K)
        return signed64(sequence.seed), sequence.request.choice_index, self.position, top_k

    @property
    def floats(self) -> tuple[float, float, float]:
        """Temperature, top-p and min-p."""
        params = self.sequence.params
        return params.temperature, params.top_p, params.min_p


class RowSettings(NamedTuple):
    """How the tokens of N rows, or of the rows of N sequences, are chosen: what `ops.sample_tokens` takes behind the
    logits, in its order.

    fp32 temperature (0: greedy); int32 top_k (0: off); fp32 top_p and min_p; int64 seed (its 64 bits), choice index and
    position of the chosen token (of a sequence: the first one behind the decided ones).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    choice: Tensor
    position: Tensor


def row_settings(rows: list[Row], device: torch.device | str) -> RowSettings:
    """Everything goes to the device in one copy."""
    count = len(rows)
    *keys, top_k = np.array([row.integers for row in rows], dtype=np.int64).T
    floats = np.array([row.floats for row in rows], dtype=np.float32).T
    parts = (*keys, floats, top_k.astype(np.int32))
    sent = torch.frombuffer(bytearray(b"".join(part.tobytes() for part in parts)), dtype=torch.uint8).to(device)
    key_3N, float_3N, top_k_N = sent.split([24 * count, 12 * count, 4 * count])
    temperature_N, top_p_N, min_p_N = float_3N.view(torch.float32).view(3, count)
    seed_N, choice_N, position_N = key_3N.view(torch.int64).view(3, count)
    return RowSettings(temperature_N, top_k_N.view(torch.int32), top_p_N, min_p_N, seed_N, choice_N, position_N)


def choose(logits_NV: Tensor, rows: list[Row], eos_ids: tuple[int, ...]) -> Tensor:
    """The target's token of every row, int64 [N]: argmax of what the filters leave plus its noise."""
    logits_NV = adjust(logits_NV, rows, eos_ids)
    if all(row.sequence.params.greedy for row in rows):
        return logits_NV.argmax(-1)
    return ops.sample_tokens(logits_NV, *row_settings(rows, logits_NV.device))


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

    Of entries that tie across a row's top-k only some are among them, which is enough for a guess.
    """

    values_NK: Tensor
    ids_NK: Tensor

    @staticmethod
    def of(logits_NV: Tensor, params: list[SamplingParams]) -> "Survivors | None":
        """None when some row has no top-k."""
        limit_N, top_p_N, min_p_N = _filters(logits_NV, params)
        vocab = logits_NV.shape[-1]
        largest = max(1 if p.greedy else min(p.top_k or vocab, vocab) for p in params)
        if largest == vocab:
            return None
        top = logits_NV.topk(largest, dim=-1)
        scaled_NK = top.values / _temperatures(logits_NV, params)
        threshold_N1 = smallest_kept(scaled_NK, limit_N, top_p_N, min_p_N)
        return Survivors(scaled_NK.masked_fill(scaled_NK < threshold_N1, float("-inf")), top.indices)


def filtered(logits_NV: Tensor, rows: list[Row]) -> Tensor:
    """logits / temperature with everything outside top-k, top-p and min-p at -inf; greedy rows keep only their best
    token.

    Every filter is a threshold on the value, so equal values stay or go together and no tie depends on a sort.
    """
    params = [row.sequence.params for row in rows]
    scaled_NV = logits_NV / _temperatures(logits_NV, params)
    return scaled_NV.masked_fill(scaled_NV < thresholds(scaled_NV, *_filters(logits_NV, params)), float("-inf"))


def _filters(logits_NV: Tensor, params: list[SamplingParams]) -> tuple[Tensor, Tensor, Tensor]:
    """top_k (1 on greedy rows, 0: off), top_p and min_p, [N] each."""
    rows = [(1 if p.greedy else p.top_k, p.top_p, p.min_p) for p in params]
    return torch.tensor(rows, device=logits_NV.device).unbind(1)


def _temperatures(logits_NV: Tensor, params: list[SamplingParams]) -> Tensor:
    temperatures = [1.0 if p.greedy else p.temperature for p in params]
    return torch.tensor(temperatures, device=logits_NV.device)[:, None]
