"""A draft with random weights, for performance work beside a target with random weights. It guesses nothing right."""

import torch
from torch import nn

from draft_model.config import DraftConfig
from draft_model.model import Eagle3Draft
from target_model.config import M3Config

# Standard deviation of its logits. A trained draft is sure of a few tokens; were this one sure of none, its trees would
# all be wide and shallow.
SPREAD = 10.0


def dummy_draft(
    target: M3Config,
    *,
    vocab: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Eagle3Draft:
    """In the published shape of a draft for this target, filled on `device`. `vocab`: it knows only so many tokens,
    random ones. UserError as `DraftConfig.for_target`.
    """
    config = DraftConfig.for_target(target, draft_vocab_size=vocab or target.vocab_size)
    with torch.device("meta"):
        draft = Eagle3Draft(config).to(dtype)
    draft = draft.to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    for module in draft.modules():
        if isinstance(module, nn.RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, nn.Linear | nn.Embedding):
            spread = SPREAD if module is draft.lm_head else 1.0
            module.weight.normal_(std=spread * module.weight.shape[-1] ** -0.5, generator=generator)
    if draft.d2t is not None:
        order = torch.randperm(config.vocab_size, generator=generator, device=device)
        known = order[: config.draft_vocab_size].sort().values
        draft.d2t.copy_(known - torch.arange(len(known), device=device))
    return draft
