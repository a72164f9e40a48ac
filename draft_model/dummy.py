"""A draft with random weights, for performance work beside a target with random weights. It guesses nothing right."""

import torch
from torch import nn

from draft_model.config import DraftConfig
from draft_model.model import Eagle3Draft
from target_model.config import M3Config


def dummy_draft(
    target: M3Config, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> Eagle3Draft:
    """In the published shape of a draft for this target, filled on `device`; UserError as `DraftConfig.for_target`."""
    config = DraftConfig.for_target(target)
    with torch.device("meta"):
        draft = Eagle3Draft(config).to(dtype)
    draft = draft.to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    for module in draft.modules():
        if isinstance(module, nn.RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(std=module.weight.shape[-1] ** -0.5, generator=generator)
    return draft
