"""Makes the tiny drafts beside it, each in the layout of another trainer, and what each computes.

    python make.py DIRECTORY

Uses torch, safetensors and json alone, and its own forward pass: it must stay independent of the project's code, which
the drafts are there to test. Weights are random (seeded), norms away from one.

S rows: row i reads the token x[i] and the taps of the position before it, at RoPE position i + 1; a further row drafts
from the last one.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, HEADS, HEAD, MLP, VOCAB, PRUNED, ROWS = 16, 4, 4, 24, 40, 12, 6
THETA = 5000000.0

PLAIN = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}
EAGLE3 = PLAIN | {"architectures": ["LlamaForCausalLMEagle3"], "head_dim": HEAD, "rope_theta": THETA}


def ids(*layers: int) -> dict:
    return {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(layers)}}


# Name -> (config.json, layer prefix, KV heads, kept vocabulary, switches, embedding stored, where the weights stand)
DRAFTS = {
    "published": (
        EAGLE3
        | {"target_hidden_size": HIDDEN, "num_key_value_heads": 4, "draft_vocab_size": VOCAB, "attention_bias": False}
        | {"fc_norm": True, "norm_output": True, "num_aux_hidden_states": 3, "torch_dtype": "bfloat16"}
        | ids(2, 4, 5),
        "layers.0.",
        4,
        VOCAB,
        {"fc_norm", "norm_output"},
        True,
        "model.safetensors",
    ),
    # A GQA draft without fc_norm, with biases, in two shards.
    "vllm-gqa": (
        EAGLE3
        | {"num_key_value_heads": 2, "draft_vocab_size": VOCAB, "attention_bias": True, "norm_before_residual": True}
        | ids(2, 4, 5),
        "layers.0.",
        2,
        VOCAB,
        {"attention_bias", "norm_before_residual"},
        True,
        "shards",
    ),
    # SpecForge leaves the embedding to the target and names the layers that are left.
    "specforge": (
        EAGLE3
        | {"num_key_value_heads": 2, "draft_vocab_size": PRUNED, "pad_token_id": 0, "pretraining_tp": 1}
        | {"attention_bias": False, "torch_dtype": "bfloat16", "transformers_version": "4.57.1"}
        | ids(1, 3, 4),
        "midlayer.",
        2,
        PRUNED,
        set(),
        False,
        "model.safetensors",
    ),
    "torchspec": (
        EAGLE3
        | {"num_key_value_heads": 4, "draft_vocab_size": VOCAB, "norm_output": True, "_torchspec_version": "0.2"}
        | ids(2, 4, 5),
        "midlayer.",
        4,
        VOCAB,
        {"norm_output"},
        True,
        "model.safetensors",
    ),
    "speculators": (
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "draft_vocab_size": PRUNED,
            "target_hidden_size": None,
            "norm_before_residual": True,
            "norm_before_fc": False,
            "fc_norm": True,
            "norm_output": False,
            "embed_requires_grad": False,
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": "some/target", "architectures": ["SomeForCausalLM"]},
            },
            "transformer_layer_config": PLAIN
            | {"num_key_value_heads": 2, "head_dim": HEAD, "attention_bias": False}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}},
        },
        "layers.0.",
        2,
        PRUNED,
        {"fc_norm", "norm_before_residual"},
        True,
        "model.safetensors",
    ),
    # EAGLE's own: the plain Llama class, no layer ids, no rope_theta (10000), no embedding, pickled.
    "eagle": (
        PLAIN | {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4, "draft_vocab_size": PRUNED},
        "midlayer.",
        4,
        PRUNED,
        set(),
        False,
        "pytorch_model.bin",
    ),
}


def random_weights(generator, kv_heads: int, kept: int, switches: set) -> dict:
    def matrix(rows: int, columns: int):
        return (torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5).bfloat16()

    def vector(size: int, centre: float = 1.0):
        return (centre + 0.3 * torch.randn(size, generator=generator)).bfloat16()

    sizes = {"q": HEADS * HEAD, "k": kv_heads * HEAD, "v": kv_heads * HEAD}
    weights = {f"self_attn.{name}_proj.weight": matrix(size, 2 * HIDDEN) for name, size in sizes.items()}
    weights["self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD)
    if "attention_bias" in switches:
        biases = {**sizes, "o": HIDDEN}
        weights |= {f"self_attn.{name}_proj.bias": vector(size, 0.0) for name, size in biases.items()}
    weights |= {f"mlp.{name}_proj.weight": matrix(MLP, HIDDEN) for name in ("gate", "up")}
    weights["mlp.down_proj.weight"] = matrix(HIDDEN, MLP)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"{name}.weight"] = vector(HIDDEN)
    weights = {"layer." + name: tensor for name, tensor in weights.items()}
    if "fc_norm" in switches:
        weights |= {f"fc_norm.{i}.weight": vector(HIDDEN) for i in range(3)}
    weights["fc.weight"] = matrix(HIDDEN, 3 * HIDDEN)
    weights["norm.weight"] = vector(HIDDEN)
    weights["lm_head.weight"] = matrix(kept, HIDDEN)
    weights["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16()
    if kept < VOCAB:
        chosen = torch.randperm(VOCAB, generator=generator)[:kept].sort().values
        weights["d2t"] = chosen - torch.arange(kept)
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        weights["t2d"][chosen] = True
    return weights


def rms(x, weight):
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def rotate(x, positions, theta: float):
    """[rows, heads, HEAD], pairs half a head apart."""
    out = x.clone()
    for pair in range(HEAD // 2):
        angle = positions.float() * theta ** (-2 * pair / HEAD)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., pair], x[..., pair + HEAD // 2]
        out[..., pair], out[..., pair + HEAD // 2] = a * cos - b * sin, b * cos + a * sin
    return out


def layer(w: dict, switches: set, theta: float, tokens, feature, positions, past):
    """New state and the keys and values so far; the last len(tokens) rows are new and causal among themselves."""
    normed = rms(feature, w["layer.hidden_norm.weight"])
    residual = normed if "norm_before_residual" in switches else feature
    inputs = torch.cat([rms(w["embed_tokens.weight"][tokens], w["layer.input_layernorm.weight"]), normed], dim=-1)

    def project(name: str, x):
        bias = w.get(f"layer.self_attn.{name}_proj.bias")
        return x @ w[f"layer.self_attn.{name}_proj.weight"].T + (0 if bias is None else bias)

    rows = len(tokens)
    q = rotate(project("q", inputs).view(rows, -1, HEAD), positions, theta)
    k = rotate(project("k", inputs).view(rows, -1, HEAD), positions, theta)
    v = project("v", inputs).view(rows, -1, HEAD)
    if past is not None:
        k, v = torch.cat([past[0], k]), torch.cat([past[1], v])
    group, first = HEADS // k.shape[1], len(k) - rows
    attended = torch.zeros(rows, HEADS, HEAD)
    for row in range(rows):
        for head in range(HEADS):
            seen = first + row + 1
            scores = k[:seen, head // group] @ q[row, head] / HEAD**0.5
            attended[row, head] = scores.softmax(0) @ v[:seen, head // group]
    state = residual + project("o", attended.flatten(1))
    hidden = rms(state, w["layer.post_attention_layernorm.weight"])
    gate, up = hidden @ w["layer.mlp.gate_proj.weight"].T, hidden @ w["layer.mlp.up_proj.weight"].T
    return state + (gate * gate.sigmoid() * up) @ w["layer.mlp.down_proj.weight"].T, (k, v)


def expected(weights: dict, switches: set, theta: float, generator) -> dict:
    """Inputs and fp32 logits of ROWS rows and of one drafted row behind them."""
    w = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    aux = torch.randn(ROWS, 3 * HIDDEN, generator=generator) * 3
    tokens = torch.randint(0, VOCAB, (ROWS + 1,), generator=generator)
    parts = aux.split(HIDDEN, dim=-1)
    if "fc_norm" in switches:
        parts = [rms(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
    feature = torch.cat(list(parts), dim=-1) @ w["fc.weight"].T
    state, past = layer(w, switches, theta, tokens[:-1], feature, torch.arange(ROWS) + 1, None)
    fed = rms(state, w["norm.weight"]) if "norm_output" in switches else state
    drafted, _ = layer(w, switches, theta, tokens[-1:], fed[-1:], torch.tensor([ROWS + 1]), past)
    logits = rms(torch.cat([state, drafted]), w["norm.weight"]) @ w["lm_head.weight"].T
    kept = w["d2t"] + torch.arange(len(w["d2t"])) if "d2t" in w else torch.arange(VOCAB)
    return {"aux": aux, "tokens": tokens, "logits": logits, "target_ids": kept}


def write(directory: Path, name: str, seed: int) -> None:
    config, prefix, kv_heads, kept, switches, with_embedding, where = DRAFTS[name]
    generator = torch.Generator().manual_seed(seed)
    weights = random_weights(generator, kv_heads, kept, switches)
    theta = 10000.0 if name == "eagle" else THETA
    result = expected(weights, switches, theta, generator)
    result["embedding"] = weights["embed_tokens.weight"]
    stored = {key.replace("layer.", prefix, 1) if key.startswith("layer.") else key: t for key, t in weights.items()}
    if not with_embedding:
        del stored["embed_tokens.weight"]
    folder = directory / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    if where == "shards":
        names = sorted(stored)
        files = {n: f"model-0000{1 + (i >= len(names) // 2)}-of-00002.safetensors" for i, n in enumerate(names)}
        for file in sorted(set(files.values())):
            save_file({n: stored[n] for n in names if files[n] == file}, folder / file)
        size = sum(t.numel() * t.element_size() for t in stored.values())
        index = {"metadata": {"total_size": size}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    elif where.endswith(".bin"):
        torch.save(stored, folder / where)
    else:
        save_file(stored, folder / where)
    save_file(result, folder / "expected.safetensors")


if __name__ == "__main__":
    for number, draft in enumerate(DRAFTS):
        write(Path(sys.argv[1]), draft, number)
