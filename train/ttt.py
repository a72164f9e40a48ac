"""Training-time test: the draft unrolled over its own states, as it will be served.

R rows, S tokens in a row, A taps' width, H hidden. Row p of step k reads the token x[p + 1 + k] and, at step 0, the
target's taps of p, later the draft's own state of row p at step k - 1; it sits at RoPE position p + 1 + k and predicts
x[p + 2 + k]. Its query sees the step-0 keys of the rows up to p (never shifted) and its own column of later steps: what
a served draft sees when it drafts from p.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from draft_model.model import Eagle3Draft
from target_model.errors import UserError
from train.attention import Segments, chosen_keys, explicit_attention, flash_attention
from train.features import Features

AttentionKind = Literal["auto", "explicit", "flash"]


def valid_rows(valid_steps_RS: Tensor, steps: int) -> list[Tensor]:
    """The rows that count at each step: ascending indices into the flattened [R * S], each step's among the last's."""
    flat = valid_steps_RS.flatten()
    return [(flat > step).nonzero()[:, 0] for step in range(steps)]


def unroll(
    draft: Eagle3Draft,
    features: Features,
    rows: list[Tensor],
    attention: AttentionKind = "auto",
    recompute: bool = False,
) -> list[Tensor]:
    """Normed states of the rows that count, [M_k, H] for each step k of `rows`: the draft's head applies directly.

    With `recompute` the layer keeps only what attention needs and works out the rest again in the backward pass.

    Step 0 makes keys and values of every row, since later rows see them; everything else is computed for `rows` only.
    """
    attend = choose_attention(attention, features, draft.config.num_heads)
    call = partial(checkpoint, use_reentrant=False) if recompute and torch.is_grad_enabled() else _call
    scale = draft.config.head_dim**-0.5
    shape = features.token_ids.shape
    ids, positions = features.token_ids.flatten(), features.positions.flatten()
    # x[p + 1]: behind a row's end any token will do, such rows never count.
    next_ids = nn.functional.pad(features.token_ids[:, 1:], (0, 1))
    feature = draft.project(features.aux)
    q, k0, v0, residual = call(draft.attention_inputs, next_ids, feature, features.positions + 1)
    residual = residual.flatten(0, 1).index_select(0, rows[0])
    own_k: list[Tensor] = []
    own_v: list[Tensor] = []
    normed_states: list[Tensor] = []
    for step, chosen in enumerate(rows):
        if step > 0:
            kept = (features.valid_steps.flatten()[rows[step - 1]] > step).nonzero()[:, 0]
            feature = feature.index_select(0, kept)
            *packed, residual = call(
                draft.attention_inputs, ids[chosen + 1 + step], feature, positions[chosen] + 1 + step
            )
            q, k, v = (_spread(x, chosen, shape) for x in packed)
            own_k.append(k)
            own_v.append(v)
        attended = attend(q, k0, v0, own_k, own_v, features.documents, features.packed, scale)
        state = call(draft.attention_output, attended.flatten(0, 1).index_select(0, chosen), residual)
        normed = draft.norm(state)
        normed_states.append(normed)
        feature = normed if draft.config.norm_output else state
    return normed_states


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _spread(x_MnD: Tensor, rows_M: Tensor, shape: torch.Size) -> Tensor:
    """Puts the rows back in their places of [R, S, n, D], zeros elsewhere."""
    flat = x_MnD.new_zeros(shape.numel(), *x_MnD.shape[1:])
    # Not index_copy_: that keeps x_MnD for its gradient, another third of what a step keeps.
    return flat.index_put_((rows_M,), x_MnD).unflatten(0, shape)


def choose_attention(kind: AttentionKind, features: Features, num_heads: int) -> Callable[..., Tensor]:
    """The one place that chooses: flash wherever PyTorch's kernels can express the mask."""
    if features.blocks is not None:
        if kind == "flash":
            raise UserError("ttt.attention: flash does not mask chosen blocks; use explicit, or draft_attention=full")
        chosen = chosen_keys(features.blocks, features.positions, num_heads)
        return partial(explicit_attention, chosen_RQSS=chosen)
    half = features.aux.dtype in (torch.bfloat16, torch.float16)
    if kind == "auto":
        # PyTorch has flash attention in half precision for CUDA, and in full precision for CPUs.
        kind = "flash" if half == features.aux.is_cuda else "explicit"
    if kind == "explicit":
        return explicit_attention
    if features.packed and features.aux.is_cuda:
        return partial(flash_attention, segments=Segments.of(features.documents))
    return flash_attention
