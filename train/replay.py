"""al_replay: the acceptance length of a greedy chain, without a server.

Walk the target's own greedy text: at committed length P the draft predicts k tokens in a chain from true features, the
accepted ones are those that equal the text, and P moves on by accepted + 1. In fp32 this equals the served AL of a
greedy chain of length k.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draft_model.model import Eagle3Draft
from target_model.errors import UserError
from train.features import DraftBlocks, Features
from train.sources import read_file
from train.ttt import unroll, valid_rows

# Final states [1, S, H], the draft's taps [1, S, A] and the blocks of a sparse draft, of a text, int64 [1, S].
CaptureText = Callable[[Tensor], tuple[Tensor, Tensor, DraftBlocks | None]]
Texts = Sequence[tuple[Sequence[int], Sequence[int]]]
CHAIN = 3


@dataclass(frozen=True)
class ReplayResult:
    """Sums over all prompts: verify steps, tokens they emitted, drafted tokens among these.

    accepted_at[i]: steps that accepted more than i tokens.
    """

    steps: int
    emitted: int
    accepted: int
    accepted_at: tuple[int, ...]

    @property
    def al(self) -> float:
        """Acceptance length: emitted / steps."""
        return self.emitted / self.steps if self.steps else 0.0


@torch.no_grad()
def chain_predictions(draft: Eagle3Draft, capture: CaptureText, token_ids: Sequence[int], length: int) -> Tensor:
    """int64 [S, k]: what the draft proposes for positions p + 2, p + 3, ... from the taps of p and the token at p + 1;
    else -1.

    A chain feeds its own proposals back, while the unrolled rows read the true text: both agree as long as the chain is
    right, and behind its first miss nothing counts.
    """
    ids = torch.tensor([list(token_ids)], device=draft.lm_head.weight.device)
    final, aux, blocks = capture(ids)
    # Every row but the last reads a known token; later steps need that many known tokens more.
    size = ids.shape[1]
    positions = torch.arange(size, device=ids.device)[None]
    known = (size - 1 - positions).clamp(0, length)
    aux = aux.to(draft.lm_head.weight.dtype)
    features = Features(ids, torch.ones_like(ids), positions, known, aux, final, packed=False, blocks=blocks)
    rows = valid_rows(known, length)
    proposals = ids.new_full((size, length), -1)
    for step, (chosen, state) in enumerate(zip(rows, unroll(draft, features, rows), strict=True)):
        proposals[chosen, step] = draft.target_ids(draft.lm_head(state).float().argmax(-1))
    return proposals


def replay(
    draft: Eagle3Draft, capture: CaptureText, eos_token_ids: Sequence[int], texts: Texts, length: int
) -> ReplayResult:
    """Replays (prompt ids, answer ids) pairs with chains of `length` tokens; the answers are the target's greedy ones.

    The first answer token comes from the prompt's own pass and belongs to no step. An answer that ended by itself has
    its end-of-text token, which may be a drafted one; one cut by a limit ends with a token of the target's own.
    """
    steps = emitted = accepted = 0
    accepted_at = [0] * length
    for prompt, answer in texts:
        text = [*prompt, *answer]
        proposals = chain_predictions(draft, capture, text, length).tolist()
        last = len(text) - 1
        root = len(prompt)
        own_end = text[-1] not in eos_token_ids
        while root < last:
            row = proposals[root - 1]
            hits = 0
            while hits < min(length, last - root - own_end) and row[hits] == text[root + 1 + hits]:
                hits += 1
            for i in range(hits):
                accepted_at[i] += 1
            steps += 1
            accepted += hits
            emitted += min(hits + 1, last - root)
            root += hits + 1
    return ReplayResult(steps, emitted, accepted, tuple(accepted_at))


def read_answers(path: str) -> Texts:
    """(prompt ids, answer ids) of the rows that `spec data regenerate --temperature 0` wrote."""
    texts = []
    for row, where in read_file(path):
        ids, start = row.get("token_ids"), row.get("answer_start")
        if not isinstance(ids, list) or type(start) is not int or not 0 < start < len(ids):
            raise UserError(f"{where} has no token_ids with an answer_start: spec data regenerate writes them")
        texts.append((ids[:start], ids[start:]))
    if not texts:
        raise UserError(f"the data set {path} is empty")
    return texts


def replayed_acceptance(
    draft: Eagle3Draft, capture: CaptureText, eos_token_ids: Sequence[int], texts: Texts
) -> dict[str, Any]:
    """What the served judge would say of a greedy chain on these texts."""
    result = replay(draft, capture, eos_token_ids, texts, CHAIN)
    steps = max(1, result.steps)
    return {
        "al": result.al,
        "per_position": [count / steps for count in result.accepted_at],
        "prompts": len(texts),
        "chain": CHAIN,
        "replayed": True,
    }
