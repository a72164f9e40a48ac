"""What the draft expects behind the nodes of a growing tree: the tokens, and the chance that the target chooses them.

Two ways: from the requests on the host, with grammars and any filter, and from tensors alone, which a CUDA graph can
hold. R sequences, W nodes of a depth that are expanded, C children considered per node, K candidates that filters and
noise are applied to, V the draft's vocabulary.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from draft_model.model import Eagle3Draft
from serve.request import SamplingParams, Sequence
from serve.sampling import MAX_TOP_K, Row, RowSettings, Survivors, filtered, follow_grammars
from target_model.kernels import ops
from target_model.kernels.sample_tokens_ref import filter_sorted

# A draft is less sure of what it knows than its target: its logits are scaled before they meet the noise. Sampled
# chains of m3-tiny keep 1 to 2 % more tokens so, its default tree 0.6 %, a tree of 32 nodes 1 to 2 % fewer.
SURENESS = 1 / 0.85
# Entries of a row that filters and noise are applied to on the device: of a larger top-k only so many.
CANDIDATES = 64


class Guesses(Protocol):
    """Where a growing tree's children come from."""

    def children(self, level: int, state_RWH: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The best `width` target tokens behind each expanded node of depth level - 1, int64 [R, W, C], and the log of
        their chance to be the target's choice, -inf where a token is not allowed.
        """

    def descend(self, origin_RW: Tensor, token_RW: Tensor) -> None:
        """The nodes expanded next: each carries a token and continues one of those expanded before."""


class RequestGuesses:
    """From the requests themselves, on the host. `noise_RDV` [r, d] is that of the token behind a node of depth d."""

    def __init__(self, draft: Eagle3Draft, target_ids: Tensor, sequences: list[Sequence], noise_RDV: Tensor | None):
        self.draft, self.target_ids, self.sequences, self.noise_RDV = draft, target_ids, sequences, noise_RDV
        # Guessed tokens down to each expanded node; nobody asks for them without a grammar.
        bound = any(sequence.constraint for sequence in sequences)
        self.paths: list[list[tuple[int, ...]]] | None = [[()]] * len(sequences) if bound else None

    def children(self, level: int, state_RWH: Tensor, width: int) -> tuple[Tensor, Tensor]:
        sequences, values_RWK, ids_RWK, dead_RW1 = self.sequences, self.draft.logits(state_RWH), None, None
        logits_RWV = values_RWK
        if self.paths is not None:
            rows = [Row(sequence, path) for sequence, own in zip(sequences, self.paths, strict=True) for path in own]
            allowed_RWV = follow_grammars(values_RWK.flatten(0, 1), rows, self.target_ids).view_as(values_RWK)
            # A draft with a smaller vocabulary may know none of the tokens that are allowed.
            dead_RW1 = allowed_RWV.isneginf().all(-1, keepdim=True)
            values_RWK = logits_RWV = torch.where(dead_RW1, values_RWK, allowed_RWV)
        if self.noise_RDV is not None:
            values_RWK, ids_RWK = self._noisy(logits_RWV, self.noise_RDV[:, level - 1], width)
        total_RW1 = values_RWK.logsumexp(-1, keepdim=True)
        greedy = [sequence.params.greedy for sequence in sequences]
        if self.noise_RDV is not None and any(greedy):
            # Of a greedy row only a few of the logits may be at hand.
            total_RW1[greedy] = logits_RWV[greedy].logsumexp(-1, keepdim=True)
        values_RWC, index_RWC = values_RWK.topk(min(width, values_RWK.shape[-1]), dim=-1)
        chance_RWC = values_RWC - total_RW1
        if dead_RW1 is not None:
            chance_RWC = chance_RWC.masked_fill(dead_RW1, float("-inf"))
        index_RWC = index_RWC if ids_RWK is None else ids_RWK.gather(-1, index_RWC)
        return self.target_ids[index_RWC], chance_RWC.clamp(max=0)

    def descend(self, origin_RW: Tensor, token_RW: Tensor) -> None:
        if self.paths is not None:
            self.paths = [
                [(*own[origin], token) for origin, token in zip(origins, tokens, strict=True)]
                for own, origins, tokens in zip(self.paths, origin_RW.tolist(), token_RW.tolist(), strict=True)
            ]

    def _noisy(self, logits_RWV: Tensor, noise_RV: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
        """log q + noise of at least `width` entries of each node, and the draft's ids of these; None: of all in order.

        The target will pick the argmax of log p + noise and the draft knows log q + noise. The larger the gap between
        two of these values, the likelier their order is the same: their softmax serves as the chance.
        """
        nodes, greedy = logits_RWV.shape[1], [sequence.params.greedy for sequence in self.sequences]
        rows = [Row(sequence, ()) for sequence in self.sequences for _ in range(nodes)]
        sureness = torch.tensor([1.0 if row.sequence.params.greedy else SURENESS for row in rows])
        logits_NV = logits_RWV.flatten(0, 1) * sureness.to(logits_RWV.device)[:, None]
        # Greedy rows keep their best logits, as they are: a single surviving token would leave nothing to branch to.
        unfiltered = SamplingParams(top_k=width)
        params = [unfiltered if row.sequence.params.greedy else row.sequence.params for row in rows]
        best = Survivors.of(logits_NV, params)
        if best is not None and best.ids_NK.shape[1] >= width:
            noise_NV = noise_RV.repeat_interleave(nodes, 0)
            noisy_NK = best.values_NK + noise_NV.gather(1, self.target_ids[best.ids_NK])
            return noisy_NK.unflatten(0, (-1, nodes)), best.ids_NK.unflatten(0, (-1, nodes))
        noise_RV = noise_RV[:, self.target_ids] if self.draft.config.pruned else noise_RV
        noisy_RWV = filtered(logits_NV, rows).view_as(logits_RWV) + noise_RV[:, None]
        if any(greedy):
            noisy_RWV[greedy] = logits_RWV[greedy]
        return noisy_RWV, None


class Noise(Enum):
    """What the draft has to know of the noise: nothing where all is greedy, that of the best entries, or of all."""

    NONE = 0
    BEST = 1
    ALL = 2

    @staticmethod
    def of(params: Iterable[SamplingParams]) -> "Noise":
        sampled = [each for each in params if not each.greedy]
        if any(not 0 < each.top_k <= CANDIDATES for each in sampled):
            return Noise.ALL
        return Noise.BEST if sampled else Noise.NONE


class DeviceGuesses:
    """From tensors alone: every operation has a fixed shape and none waits for the device.

    Sampled rows look at the `CANDIDATES` best entries; those without a top-k, or with a larger one, at all, and leave
    the other filters to the target.
    """

    def __init__(self, draft: Eagle3Draft, target_ids: Tensor, rows: RowSettings, noise: Noise):
        self.draft, self.target_ids, self.rows, self.noise = draft, target_ids, rows, noise
        if noise is not Noise.NONE:
            temperature_R11, top_k_R11, self.top_p_R11, self.min_p_R11 = (row_R[:, None, None] for row_R in rows[:4])
            self.greedy_R11 = temperature_R11 == 0
            self.scale_R11 = SURENESS / temperature_R11.clamp(min=1e-6)
            self.limit_R11 = torch.where(top_k_R11 > 0, top_k_R11, MAX_TOP_K)

    def children(self, level: int, state_RWH: Tensor, width: int) -> tuple[Tensor, Tensor]:
        logits_RWV = self.draft.scores(state_RWH)
        nodes, width = logits_RWV.shape[:2], min(width, logits_RWV.shape[-1])

        def best(values_RWV: Tensor, count: int) -> tuple[Tensor, ...]:
            return tuple(each.view(*nodes, -1) for each in ops.top_rows(values_RWV.flatten(0, 1), count))

        if self.noise is Noise.NONE:
            values_RWC, ids_RWC, total_RW1 = best(logits_RWV, width)
            return self.target_ids[ids_RWC], (values_RWC - total_RW1).clamp(max=0)
        values_RWK, ids_RWK, total_RW1 = best(logits_RWV, min(max(width, CANDIDATES), logits_RWV.shape[-1]))
        # As RequestGuesses._noisy says.
        kept_RWK = filter_sorted(values_RWK * self.scale_R11, self.limit_R11, self.top_p_R11, self.min_p_R11)
        noisy_RWK = kept_RWK + self._noise(level, ids_RWK)
        total_RW1 = torch.where(self.greedy_R11, total_RW1, noisy_RWK.logsumexp(-1, keepdim=True))
        values_RWC, place_RWC = torch.where(self.greedy_R11, values_RWK, noisy_RWK).topk(width, dim=-1)
        ids_RWC = ids_RWK.gather(-1, place_RWC)
        if self.noise is Noise.ALL:
            tokens_V, scale_R = self.target_ids if self.draft.config.pruned else None, self.scale_R11.flatten()
            found = ops.noisy_top_rows(logits_RWV.flatten(0, 1), width, scale_R, *self._keys(level), tokens_V)
            whole = [each.view(*nodes, -1) for each in found]
            open_R11 = ~self.greedy_R11 & (self.limit_R11 > CANDIDATES)
            values_RWC, ids_RWC, total_RW1 = (
                torch.where(open_R11, *pair) for pair in zip(whole, (values_RWC, ids_RWC, total_RW1), strict=True)
            )
        return self.target_ids[ids_RWC], (values_RWC - total_RW1).clamp(max=0)

    def descend(self, origin_RW: Tensor, token_RW: Tensor) -> None:
        """Nothing here depends on the path."""

    def _noise(self, level: int, ids_RWK: Tensor) -> Tensor:
        return ops.gumbel_at(*self._keys(level), self.target_ids[ids_RWK].flatten(0, 1)).view(ids_RWK.shape)

    def _keys(self, level: int) -> tuple[Tensor, Tensor, Tensor]:
        """Seed, choice and position of the tokens behind the nodes of each sequence."""
        return self.rows.seed, self.rows.choice, self.rows.position + (level - 1)
