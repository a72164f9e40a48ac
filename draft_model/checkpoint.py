"""The published checkpoint layout (`config.json` + `model.safetensors`), read strictly and written whole or not at all.

Published names: fc, fc_norm.N, layers.0.* (also read: midlayer.*), norm, embed_tokens, lm_head, and for a pruned
vocabulary d2t, t2d.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
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
MAPS = ("d2t", "t2d")  # of a pruned vocabulary: whole numbers, unlike all other tensors

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
    """A draft for inference. A tensor that is missing, unknown, mis-shaped or not finite is an error that names it."""
    directory = Path(directory)
    config = DraftConfig.from_json(directory / "config.json", default_taps)
    with torch.device("meta"):
        model = Eagle3Draft(config)
    filled: dict[str, Tensor] = {}
    with _checked(directory, config) as read:
        for name, parameter in model.named_parameters():
            published = published_names(name)
            filled[name] = torch.cat([read(each).to(dtype) for each in published]).to(device)
            parts = filled[name].split(split_sizes(config, name, parameter.shape[0]))
            for each, part in zip(published, parts, strict=True):
                check_finite(each, part, directory / WEIGHTS)
        if config.pruned:
            filled["d2t"] = read("d2t").to(device, torch.int64)
    model.load_state_dict(filled, strict=True, assign=True)
    return model.eval().requires_grad_(False)


def check_draft(directory: str | os.PathLike, default_taps: tuple[int, ...] | None = None) -> DraftConfig:
    """The config of a draft whose file is whole, by its header: what `load_draft` refuses, without reading weights."""
    config = DraftConfig.from_json(Path(directory) / "config.json", default_taps)
    with _checked(Path(directory), config):
        return config


@contextlib.contextmanager
def _checked(directory: Path, config: DraftConfig) -> Iterator[Callable[[str], Tensor]]:
    """Reads tensors by their published names, from a file that holds what `config` says and nothing else."""
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

            def read(name: str) -> Tensor:
                return file.get_tensor(names[name])

            views = {name: file.get_slice(each) for name, each in names.items()}
            found = {name: (tuple(v.get_shape()), v.get_dtype().startswith(("F", "BF"))) for name, v in views.items()}
            unknown = check_layout(config, found, path)
            if config.pruned:
                check_vocabulary_map(read("d2t").to(torch.int64), read("t2d").to(torch.bool), config, path)
            else:
                # Some full-vocabulary checkpoints carry trivial maps; one that is not trivial contradicts the config.
                unknown = [name for name in unknown if name not in MAPS]
                if "d2t" in names and read("d2t").any():
                    raise UserError(f"{path}: tensor d2t maps ids, but config.json says the vocabulary is a full one")
            if unknown:
                raise UserError(f"{path}: unknown tensor {names[unknown[0]]} ({len(unknown)} in all)")
            yield read
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or not a safetensors file: {error}") from None


def _normalise(name: str) -> str:
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def expected_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the published layout."""
    with torch.device("meta"):
        model = Eagle3Draft(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in model.named_parameters():
        sizes = split_sizes(config, name, value.shape[0])
        shapes |= {p: (n, *value.shape[1:]) for p, n in zip(published_names(name), sizes, strict=True)}
    if config.pruned:
        shapes |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    return shapes


def check_layout(config: DraftConfig, found: Mapping[str, tuple[tuple[int, ...], bool]], where: object) -> list[str]:
    """UserError unless every tensor of the published layout is there, each of its shape and kind; returns the names
    beyond it, sorted. `found`: shapes, and whether the numbers are floating-point ones, by published name.
    """
    shapes = expected_shapes(config)
    for name, shape in shapes.items():
        if name not in found:
            raise UserError(f"{where}: tensor {name} is missing")
        given, floating = found[name]
        if given != shape:
            raise UserError(f"{where}: tensor {name} has shape {list(given)}, expected {list(shape)}")
        if floating != (name not in MAPS):
            kind = "whole" if floating else "floating-point"
            raise UserError(f"{where}: tensor {name} is of another kind: expected {kind} numbers")
    return sorted(found.keys() - shapes.keys())


def check_finite(name: str, tensor: Tensor, where: object) -> None:
    """UserError where a floating-point tensor holds a NaN or an infinity."""
    # The extremes are NaN where anything is. Unlike isfinite this copies nothing and reads as fast as memory does, but
    # it has no version for numbers of one byte.
    values = tensor.float() if tensor.element_size() == 1 else tensor
    if not torch.stack(values.aminmax()).isfinite().all():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"{where}: tensor {name} holds NaN or infinite values (read as {kind})")


def check_vocabulary_map(d2t: Tensor, t2d: Tensor, config: DraftConfig, where: object) -> None:
    """d2t must point at distinct ids of the target, ascending or not, and t2d must mark exactly those."""
    ids = d2t + torch.arange(len(d2t))
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(ids.unique()) != len(ids):
        raise UserError(f"{where}: tensor d2t does not map to distinct ids below {config.vocab_size}")
    marked = torch.zeros(config.vocab_size, dtype=torch.bool)
    marked[ids] = True
    if not torch.equal(marked, t2d):
        raise UserError(f"{where}: tensors d2t and t2d disagree about the draft vocabulary")
