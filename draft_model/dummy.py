"""A draft with random weights, for performance work beside a target with random weights. It guesses nothing right."""

import torch
from torch import nn

from draft_model.config import DraftConfig
from draft_model.model import Eagle3Draft
from target_model.config import M3Config, default_taps


def dummy_draft(
    target: M3Config, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> Eagle3Draft:
    """In the published shape: the target's width, heads (as many KV heads) and vocabulary; filled on `device`.

    Raises UserError below 7 layers, where a target has no default taps.
    """
    config = DraftConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=3 * target.hidden_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        rope_theta=target.rope_theta,
        max_position=target.max_position,
        rms_norm_eps=target.rms_norm_eps,
        fc_norm=True,
        norm_output=True,
        norm_before_residual=False,
        attention_bias=False,
        taps=default_taps(target.num_layers),
    )
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
