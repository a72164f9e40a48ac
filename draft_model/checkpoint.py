"""The published checkpoint layout (`config.json` + `model.safetensors`), read strictly and written whole or not at all.

Published names: fc, fc_norm.N, layers.0.* (also read: midlayer.*), norm, embed_tokens, lm_head, and for a pruned
vocabulary d2t, t2d.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draft_model.config import DraftConfig
from draft_model.model import Eagle3Draft
from target_model.errors import UserError, atomic_directory

WEIGHTS = "model.safetensors"

# Our parameter -> the published tensors that it packs along dimension 0.
_LAYER_NAMES: dict[str, tuple[str, ...]] = {
    "input_layernorm": ("input_layernorm",),
    "hidden_norm": ("hidden_norm",),
    "post_attention_layernorm": ("post_attention_layernorm",),
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}


def published_names(parameter: str) -> tuple[str, ...]:
    """The published tensor names behind one of our parameter names (`qkv_proj.weight` -> q, k and v)."""
    module, _, kind = parameter.rpartition(".")
    if module not in _LAYER_NAMES:
        return (parameter,)
    return tuple(f"layers.0.{name}.{kind}" for name in _LAYER_NAMES[module])


def split_sizes(config: DraftConfig, parameter: str, rows: int) -> list[int]:
    """Rows of each published tensor packed in a parameter of `rows` rows."""
    if parameter.startswith("qkv_proj"):
        kv = config.num_kv_heads * config.head_dim
        return [config.num_heads * config.head_dim, kv, kv]
    return [rows // 2] * 2 if parameter.startswith("gate_up_proj") else [rows]


def published_tensors(model: Eagle3Draft) -> dict[str, Tensor]:
    """All tensors of the checkpoint under their published names, in the model's own dtype."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.named_parameters():
        parts = value.detach().split(split_sizes(model.config, name, value.shape[0]))
        tensors.update(zip(published_names(name), parts, strict=True))
    if model.d2t is not None:
        kept = torch.zeros(model.config.vocab_size, dtype=torch.bool)
        kept[model.target_ids(torch.arange(len(model.d2t), device=model.d2t.device)).cpu()] = True
        tensors |= {"d2t": model.d2t, "t2d": kept}
    return tensors


def save_draft(
    model: Eagle3Draft,
    directory: str | os.PathLike,
    metadata: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes `config.json`, `model.safetensors` and, when given, `metadata` as `training.json`.

    `dtype` (bf16 as published, or fp32) defaults to the model's own.
    """
    tensors = {
        name: tensor.to("cpu", dtype if tensor.is_floating_point() else None).contiguous().clone()
        for name, tensor in published_tensors(model).items()
    }
    written = next(iter(tensors.values())).dtype
    with atomic_directory(directory) as work:
        config = model.config.to_json() | {"dtype": str(written).removeprefix("torch.")}
        (work / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        save_file(tensors, work / WEIGHTS, metadata={"format": "pt"})
        if metadata is not None:
            (work / "training.json").write_text(json.dumps(metadata, indent=1) + "\n")


def load_draft(
    directory: str | os.PathLike,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    default_taps: tuple[int, ...] | None = None,
) -> Eagle3Draft:
    """A draft for inference. A missing, unknown or mis-shaped tensor is an error that names it."""
    directory = Path(directory)
    config = DraftConfig.from_json(directory / "config.json", default_taps)
    with torch.device("meta"):
        model = Eagle3Draft(config)
    path = directory / WEIGHTS
    if not path.is_file():
        raise UserError(f"draft checkpoint {directory} has no {WEIGHTS}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            if (file.metadata() or {}).get("layer_ids") == "output":
                raise UserError(
                    f"{path} was written for an engine whose layer ids mean outputs: `spec import` reads it"
                )
            stored = list(file.keys())
            names = {_normalise(name): name for name in stored}
            if len(names) != len(stored):
                raise UserError(f"{path} holds the draft layer twice, as layers.0.* and as midlayer.*")
            _load_strict(model, names, file, path, dtype, device)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or not a safetensors file: {error}") from None
    return model.eval().requires_grad_(False)


def _normalise(name: str) -> str:
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _load_strict(model: Eagle3Draft, names: dict[str, str], file, path: Path, dtype: torch.dtype, device) -> None:
    """Fills the meta model from `file`; `names` maps published to stored tensor names."""

    def take(name: str, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        if name not in names:
            raise UserError(f"{path}: tensor {name} is missing")
        tensor = file.get_tensor(names.pop(name))
        if tuple(tensor.shape) != shape:
            raise UserError(f"{path}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        if tensor.is_floating_point() != kind.is_floating_point:
            raise UserError(f"{path}: tensor {name} has dtype {tensor.dtype}, expected {kind}")
        return tensor.to(kind)

    config, filled = model.config, {}
    for name, parameter in model.named_parameters():
        sizes = split_sizes(config, name, parameter.shape[0])
        parts = [take(p, (n, *parameter.shape[1:]), dtype) for p, n in zip(published_names(name), sizes, strict=True)]
        filled[name] = torch.cat(parts).to(device)
    if config.pruned:
        d2t = take("d2t", (config.draft_vocab_size,), torch.int64)
        check_vocabulary_map(d2t, take("t2d", (config.vocab_size,), torch.bool), config, path)
        filled["d2t"] = d2t.to(device)
    else:
        # Some full-vocabulary checkpoints carry trivial maps; a map that is not trivial contradicts the config.
        if "d2t" in names and take("d2t", (config.vocab_size,), torch.int64).any():
            raise UserError(f"{path}: tensor d2t maps ids, but config.json says the draft has the full vocabulary")
        names.pop("t2d", None)
    if names:
        raise UserError(f"{path}: unknown tensor {sorted(names.values())[0]} ({len(names)} in all)")
    model.load_state_dict(filled, strict=True, assign=True)


def check_vocabulary_map(d2t: Tensor, t2d: Tensor, config: DraftConfig, where: object) -> None:
    """d2t must point at distinct ids of the target, ascending or not, and t2d must mark exactly those."""
    ids = d2t + torch.arange(len(d2t))
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(ids.unique()) != len(ids):
        raise UserError(f"{where}: tensor d2t does not map to distinct ids below {config.vocab_size}")
    marked = torch.zeros(config.vocab_size, dtype=torch.bool)
    marked[ids] = True
    if not torch.equal(marked, t2d):
        raise UserError(f"{where}: tensors d2t and t2d disagree about the draft vocabulary")
