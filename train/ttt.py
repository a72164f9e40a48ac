"""Training-time test: the draft unrolled over its own states, as it will be served.

R rows, S tokens in a row, A taps' width, H hidden. Row p of step k reads the token x[p + 1 + k] and, at step 0, the target's taps of p,
later the draft's own state of row p at step k - 1; it sits at RoPE position p + 1 + k and predicts x[p + 2 + k]. Its query sees the step-0
keys of the rows up to p (never shifted) and its own column of later steps: what a served draft sees when it drafts from p.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from draft_model.model import Eagle3Draft
from train.attention import explicit_attention, flash_attention
from train.features import Features

AttentionKind = Literal["auto", "explicit", "flash"]


def unroll(draft: Eagle3Draft, features: Features, steps: int, attention: AttentionKind = "auto") -> list[Tensor]:
    """Normed states, [R, S, H] for each step: the draft's head applies directly.

    Rows that do not count (`features.valid_steps`) hold finite numbers of no meaning.
    """
    attend = choose_attention(attention, features)
    scale = draft.config.head_dim**-0.5
    length = features.token_ids.shape[1]
    # x[p + 1 + k] for all steps: behind the row's end any token will do, such rows never count.
    ids = nn.functional.pad(features.token_ids, (0, steps))
    embedded = draft.embed_tokens(ids)
    feature = draft.project(features.aux)
    k0 = v0 = None
    own_k: list[Tensor] = []
    own_v: list[Tensor] = []
    normed_states = []
    for step in range(steps):
        tokens = embedded[:, 1 + step : 1 + step + length]
        q, k, v, residual = draft.attention_inputs_embedded(tokens, feature, features.positions + (1 + step))
        if step == 0:
            k0, v0 = k, v
        else:
            own_k.append(k)
            own_v.append(v)
        attended = attend(q, k0, v0, own_k, own_v, features.documents, features.packed, scale)
        state = draft.attention_output(attended, residual)
        normed = draft.norm(state)
        normed_states.append(normed)
        feature = normed if draft.config.norm_output else state
    return normed_states


def choose_attention(kind: AttentionKind, features: Features) -> Callable[..., Tensor]:
    """The one place that chooses: flash wherever PyTorch's kernels can express the mask."""
    half = features.aux.dtype in (torch.bfloat16, torch.float16)
    possible = half and not features.packed if features.aux.is_cuda else not half
    if kind == "auto":
        kind = "flash" if possible else "explicit"
    return flash_attention if kind == "flash" else explicit_attention
