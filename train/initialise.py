"""The draft before its first step: sizes from settings and target, weights copied from the target where it has them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draft_model.checkpoint import WEIGHTS, check_draft
from draft_model.config import DraftConfig
from draft_model.model import Eagle3Draft
from draft_model.resolve import resolve_draft
from target_model.config import M3Config
from target_model.errors import UserError
from target_model.model import TargetModel
from target_model.resolve import ResolvedTarget
from train.config import DraftSettings, TrainConfig
from train.data import TrainingRows

_SIZES = ("num_heads", "num_kv_heads", "head_dim", "intermediate_size", "draft_vocab_size", "taps")
_SWITCHES = ("fc_norm", "norm_output", "norm_before_residual", "attention_bias")


def draft_config(settings: DraftSettings, target: M3Config) -> DraftConfig:
    """Sizes that the settings leave out follow the target; the MLP is three times as wide as the residual stream."""
    given = {name: _setting(settings, name) for name in (*_SIZES, *_SWITCHES)}
    return DraftConfig.for_target(target, **{name: value for name, value in given.items() if value is not None})


def _setting(settings: DraftSettings, name: str) -> Any:
    value = getattr(settings, name)
    return tuple(value) if isinstance(value, list) else value


def run_draft_config(config: TrainConfig, target: ResolvedTarget, *, weights: bool = True) -> DraftConfig:
    """The draft that `config` trains for `target`. UserError where it cannot: the draft to continue from is looked at,
    up to its weights. Without `weights` they may still be on the hub.
    """
    start = config.draft.init_from
    if start is None:
        sizes, where = draft_config(config.draft, target.config), config.run_directory
    else:
        chosen = resolve_draft(start, target, weights=weights)
        where = chosen.path
        if weights or Path(start).is_dir() or (where / WEIGHTS).is_file():
            sizes = check_draft(where, chosen.default_taps)
        else:
            sizes = DraftConfig.from_json(where / "config.json", chosen.default_taps)
    sizes.check_target(target.config, where)
    for name in config.draft.model_fields_set.intersection((*_SIZES, *_SWITCHES)) if start else ():
        wanted, has = _setting(config.draft, name), getattr(sizes, name)
        if wanted is not None and wanted != has:
            raise UserError(f"draft.{name} is {wanted}, but draft {where}, which is to be continued, has {has}")
    return sizes


def choose_vocabulary(rows: TrainingRows, size: int, vocab_size: int) -> tuple[Tensor, float]:
    """The `size` most frequent supervised tokens (ties: lower id), ascending, and the share of tokens they cover."""
    counts = np.bincount(rows.token_ids[rows.spans > 0], minlength=vocab_size)
    kept = np.sort(np.argsort(-counts, kind="stable")[:size])
    return torch.from_numpy(kept.astype(np.int64)), float(counts[kept].sum() / counts.sum())


def coverage(rows: TrainingRows, vocab_size: int) -> list[tuple[int, float]]:
    """(size of a draft vocabulary, share of the supervised tokens in it): powers of two up to the whole vocabulary."""
    sizes = [1 << bits for bits in range(8, vocab_size.bit_length()) if 1 << bits < vocab_size] + [vocab_size]
    return [(size, choose_vocabulary(rows, size, vocab_size)[1]) for size in sizes]


@torch.no_grad()
def new_draft(settings: DraftSettings, target: TargetModel, rows: TrainingRows, seed: int) -> Eagle3Draft:
    """A fresh fp32 draft on the target's device; the same seed gives the same weights on every device."""
    config = draft_config(settings, target.config)
    target.whole.check_taps(config.taps)
    generator = torch.Generator().manual_seed(seed)
    draft = Eagle3Draft(config)
    for module in draft.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=1 / math.sqrt(module.in_features), generator=generator)
            if module.bias is not None:
                module.bias.zero_()
    # The layer starts as a small correction of its residual.
    for module in (draft.o_proj, draft.down_proj):
        module.weight.mul_(0.5)
    draft.to(target.device)
    copy_from_target(draft, target, rows)
    return draft


@torch.no_grad()
def copy_from_target(draft: Eagle3Draft, target: TargetModel, rows: TrainingRows) -> None:
    """Embedding, final norm and output head (its kept rows under a pruned vocabulary, whose map is chosen here)."""
    config = draft.config
    if config.hidden_size != target.config.hidden_size:
        raise UserError(f"draft hidden size {config.hidden_size} differs from the target's {target.config.hidden_size}")
    draft.embed_tokens.weight.copy_(target.embed_tokens.weight)
    draft.norm.weight.copy_(target.norm.scale)
    head = target.lm_head.weight
    if config.pruned:
        kept, _ = choose_vocabulary(rows, config.draft_vocab_size, config.vocab_size)
        draft.d2t.copy_(kept - torch.arange(len(kept)))
        head = head[kept.to(head.device)]
    draft.lm_head.weight.copy_(head)


def set_trainable(draft: Eagle3Draft, settings: DraftSettings) -> None:
    """Freezes what the settings do not train. Some servers rely on an embedding equal to the target's."""
    draft.requires_grad_(True)
    draft.embed_tokens.weight.requires_grad_(settings.train_embedding)
    draft.lm_head.weight.requires_grad_(settings.train_head)
