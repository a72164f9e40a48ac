"""Exports computed by transformers' Llama parts, put together as the layout says."""

import pytest
import torch
from safetensors.torch import load_file

from draft_model.checkpoint import save_draft
from draft_model.export import Verifier, export_draft
from draft_model.importing import read_draft
from tests.draft_model.drafts import random_draft

ROWS = 20
VARIANTS = [
    {},
    {"num_kv_heads": 2, "rope_theta": 5000000.0, "head_dim": 32},
    {"attention_bias": True, "fc_norm": False},
]


def llama_parts(config, tensors, prefix):
    """Attention over [2H] inputs, MLP, and norms of the checkpoint, as transformers' modules."""
    from torch import nn
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

    llama = LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        attention_bias=config.attention_bias,
        max_position_embeddings=2**20,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )
    llama._attn_implementation = "eager"
    attention, mlp = LlamaAttention(llama, 0), LlamaMLP(llama)
    for name in ("q_proj", "k_proj", "v_proj"):
        old = getattr(attention, name)
        setattr(attention, name, nn.Linear(2 * config.hidden_size, old.out_features, bias=config.attention_bias))
    for module, part in ((attention, "self_attn."), (mlp, "mlp.")):
        here = prefix + part
        module.load_state_dict({n.removeprefix(here): t for n, t in tensors.items() if n.startswith(here)}, strict=True)

    def norm(name: str):
        module = LlamaRMSNorm(len(tensors[name]), eps=config.rms_norm_eps)
        module.load_state_dict({"weight": tensors[name]})
        return module

    return attention, mlp, norm, LlamaRotaryEmbedding(llama)


@torch.no_grad()
def llama_logits(config, tensors, prefix, aux, tokens, positions):
    attention, mlp, norm, rotary = llama_parts(config, tensors, prefix)
    parts = aux.chunk(3, dim=-1)
    if config.fc_norm:
        parts = [norm(f"fc_norm.{i}.weight")(part) for i, part in enumerate(parts)]
    feature = torch.cat(list(parts), dim=-1) @ tensors["fc.weight"].T
    embedded = norm(f"{prefix}input_layernorm.weight")(tensors["embed_tokens.weight"][tokens])
    inputs = torch.cat([embedded, norm(f"{prefix}hidden_norm.weight")(feature)], dim=-1)[None]
    mask = torch.full((ROWS, ROWS), float("-inf")).triu(1)[None, None]
    attended, _ = attention(inputs, position_embeddings=rotary(inputs, positions[None]), attention_mask=mask)
    state = feature + attended[0]
    state = state + mlp(norm(f"{prefix}post_attention_layernorm.weight")(state))
    return norm("norm.weight")(state) @ tensors["lm_head.weight"].T


@torch.no_grad()
def our_logits(draft, aux, tokens, positions):
    q, k, v, residual = draft.attention_inputs(tokens, draft.project(aux), positions)
    groups = draft.config.num_heads // draft.config.num_kv_heads
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
    return draft.logits(draft.attention_output(attended, residual))


# fp32 angles, whose last bit grows with the position.
@pytest.mark.parametrize(("start", "atol"), [(1, 2e-4), (100_000, 5e-3)])
@pytest.mark.parametrize(("engine", "prefix"), [("hf", "layers.0."), ("atom", "midlayer.")])
@pytest.mark.parametrize("overrides", VARIANTS)
def test_llama_parts_compute_our_logits(tmp_path, overrides, engine, prefix, start, atol):
    if engine == "atom" and "attention_bias" in overrides:
        engine, prefix = "vllm", "layers.0."
    draft = random_draft(**overrides)
    save_draft(draft, tmp_path / "source")
    found = read_draft(tmp_path / "source", layer_ids="entering")
    export_draft(found, engine, tmp_path / "export", Verifier("t", [], 4096), "# card\n")
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    aux = torch.randn(ROWS, 3 * draft.config.target_hidden_size, generator=generator) * 2
    tokens = torch.randint(0, draft.config.vocab_size, (ROWS,), generator=generator)
    positions = torch.arange(ROWS) + start
    other = llama_logits(draft.config, tensors, prefix, aux, tokens, positions)
    torch.testing.assert_close(our_logits(draft, aux, tokens, positions), other, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("engine", ["hf", "vllm", "sglang", "atom"])
def test_the_config_as_the_engines_get_it(tmp_path, engine):
    """They read it through transformers, whose defaults must not slip in."""
    from transformers import AutoConfig

    draft = random_draft(num_kv_heads=2, head_dim=32, rope_theta=5000000.0, draft_vocab_size=300)
    save_draft(draft, tmp_path / "source")
    found = read_draft(tmp_path / "source", layer_ids="entering")
    export_draft(found, engine, tmp_path / "export", Verifier("t", [], 4096), "# card\n")
    config = AutoConfig.from_pretrained(tmp_path / "export")
    assert config.architectures == ["LlamaForCausalLMEagle3"] and config.model_type == "llama"
    assert config.rope_parameters["rope_theta"] == 5000000.0 and config.rope_parameters["rope_type"] == "default"
    assert (config.head_dim, config.num_key_value_heads, config.num_hidden_layers) == (32, 2, 1)
    assert (config.max_position_embeddings, config.rms_norm_eps, config.draft_vocab_size) == (4096, 1e-6, 300)
    assert config.tie_word_embeddings is False and config.attention_bias is False
    assert config.fc_norm is True and config.norm_output is True and config.num_aux_hidden_states == 3
