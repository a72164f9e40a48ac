"""The draft's training loss as one would write it first: all rows at all steps, flex attention, full logits.

R rows of text, S tokens in a row, D head dim.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from draft_model.model import Eagle3Draft
from train.features import Features


def plain_loss(
    draft: Eagle3Draft, features: Features, teacher_head: Tensor, weights: Tensor, attend: Callable[..., Tensor]
) -> Tensor:
    """The loss of all TTT steps but for the entropy of the teacher, which has no gradient; one document a row."""
    config, length = draft.config, features.token_ids.shape[1]
    teacher = F.linear(features.final_state, teacher_head).float().softmax(-1)
    feature, keys, values = draft.project(features.aux), [], []
    total = teacher.new_zeros(())
    for step, weight in enumerate(weights):
        # Row p reads x[p + 1 + step] and is judged by the target's distribution at that position.
        ids = F.pad(features.token_ids[:, 1 + step :], (0, 1 + step))
        target = F.pad(teacher[:, 1 + step :], (0, 0, 0, 1 + step))
        q, k, v, residual = draft.attention_inputs(ids, feature, features.positions + 1 + step)
        keys.append(k)
        values.append(v)
        heads_first = (x.transpose(1, 2) for x in (q, torch.cat(keys, dim=1), torch.cat(values, dim=1)))
        attended = attend(*heads_first, length, config.head_dim**-0.5).transpose(1, 2)
        state = draft.attention_output(attended, residual)
        normed = draft.norm(state)
        log_q = draft.lm_head(normed).float().log_softmax(-1)
        rows = -(target * log_q).sum(-1)
        total = total + weight * (rows * (features.valid_steps > step)).sum()
        feature = normed if config.norm_output else state
    return total


def flex_rows(q: Tensor, k: Tensor, v: Tensor, length: int, scale: float) -> Tensor:
    """Step-0 keys up to the row, and the row's own column of later steps. [R, heads, S, D] and [.., steps * S, D]."""
    return _compiled_flex()(q, k, v, block_mask=_block_mask(length, k.shape[2], q.device), scale=scale)


def masked_rows(q: Tensor, k: Tensor, v: Tensor, length: int, scale: float) -> Tensor:
    """The same with a mask in memory: flex attention has no gradient on the CPU."""
    keys = torch.arange(k.shape[2], device=q.device)
    mask = _sees(None, None, torch.arange(length, device=q.device)[:, None], keys[None], length)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _sees(b: Tensor | None, h: Tensor | None, query: Tensor, key: Tensor, length: int) -> Tensor:
    place = key % length
    return torch.where(key < length, place <= query, place == query)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


@functools.cache
def _block_mask(length: int, keys: int, device: torch.device) -> BlockMask:
    return create_block_mask(functools.partial(_sees, length=length), None, None, length, keys, device=device)
