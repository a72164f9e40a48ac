"""Random drafts for tests: every norm has a non-trivial weight, so that a forgotten or doubled norm shows."""

from typing import Any

import torch

from draft_model.config import DraftConfig
from draft_model.model import Eagle3Draft

SIZES = {
    "hidden_size": 64,
    "target_hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 16,
    "vocab_size": 300,
    "draft_vocab_size": 300,
    "rope_theta": 10000.0,
    "max_position": 256,
    "rms_norm_eps": 1e-6,
    "fc_norm": True,
    "norm_output": True,
    "norm_before_residual": False,
    "attention_bias": False,
    "taps": (1, 3, 5),
}


def draft_config(**overrides: Any) -> DraftConfig:
    return DraftConfig(**(SIZES | overrides))


@torch.no_grad()
def random_draft(seed: int = 0, **overrides: Any) -> Eagle3Draft:
    """An fp32 draft; a pruned one keeps every third id or so."""
    config = draft_config(**overrides)
    generator = torch.Generator().manual_seed(seed)
    draft = Eagle3Draft(config)
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else noise * 1.5 / parameter.shape[-1] ** 0.5)
    draft.embed_tokens.weight.copy_(torch.randn(draft.embed_tokens.weight.shape, generator=generator))
    if config.pruned:
        kept = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
        draft.d2t.copy_(kept - torch.arange(len(kept)))
    return draft
