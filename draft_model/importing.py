"""Drafts of other trainers and engines: what a directory holds, in our config and the published tensor names.

Read: `layers.0.*` and `midlayer.*`, `LlamaForCausalLMEagle3` configs (SpecForge, TorchSpec, SGLang, vLLM, ATOM), the
nested configs of speculators, and EAGLE's own plain Llama configs; safetensors, sharded or not, and pytorch_model.bin.
Whatever our draft cannot compute is refused, by the tensor's or the key's name.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_model.checkpoint import MAPS, check_finite, check_layout, check_vocabulary_map
from draft_model.config import ARCHITECTURE, DraftConfig, read_json
from draft_model.engines import ID_OFFSET, LAYER_IDS, Convention
from draft_model.weight_files import read_weights, stored_names
from target_model.errors import UserError

# Wrappers that trainers leave in front of the names.
_WRAPPERS = ("draft_model.", "model.")
# A part of a name that our draft has no place for -> what it stands for.
_FOREIGN = {
    "input_norm": "one norm over all taps (norm_before_fc)",
    "q_norm": "a norm of the queries",
    "k_norm": "a norm of the keys",
    "layers.1.": "a second layer",
    "fc.bias": "a bias behind fc",
    "mask_hidden": "parallel drafting",
    "kv_a_proj": "latent attention",
    "experts": "a mixture of experts",
    "mlp.gate_proj.bias": "biases in the MLP",
}
# Copies of the target's parts, which trainers save beside the draft and no engine reads.
_TARGET_PARTS = ("verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True)
class TargetParts:
    """What a checkpoint may leave to the target: default taps, context length and, when at hand, the embedding."""

    default_taps: tuple[int, ...] | None
    max_position: int
    embedding: Tensor | None


@dataclass(frozen=True)
class ImportedDraft:
    """`tensors` under their published names, in the stored dtypes. `notes`: what was found and assumed."""

    config: DraftConfig
    tensors: dict[str, Tensor]
    layout: str
    notes: tuple[str, ...]


def read_draft(
    directory: Path,
    *,
    layer_ids: Convention | None = None,
    norm_before_residual: bool | None = None,
    target: TargetParts | None = None,
) -> ImportedDraft:
    """Reads any known layout. Raises UserError for what is missing, ambiguous or not representable.

    layer_ids             meaning of explicit layer ids; needed where the directory does not say it
    norm_before_residual  overrides the config, or fills in where readers disagree about the default
    """
    source = read_json(directory / "config.json")
    if not any(name.split(".")[-2:] == ["fc", "weight"] for name in stored_names(directory)):
        raise UserError(
            f"{directory} holds no EAGLE-3 draft: it has no tensor fc.weight, which takes the target's taps in"
        )
    stored, metadata = read_weights(directory)
    notes: list[str] = []
    tensors = _published(stored, directory, notes)
    layout = _layout(source)
    plain = _plain_config(source, directory)
    _fill_in(plain, tensors, notes, target)
    if norm_before_residual is not None:
        plain["norm_before_residual"] = norm_before_residual
    elif layout == "speculators" and "norm_before_residual" not in plain:
        raise UserError(
            f"{directory}: config.json does not say norm_before_residual, which speculators reads as false and vLLM as "
            "true: say it with --norm-before-residual or --no-norm-before-residual"
        )
    taps = _taps(plain, layout, metadata, layer_ids, target, directory, notes)
    plain.pop(LAYER_IDS, None)
    plain["eagle_config"] = {LAYER_IDS: list(taps)}
    if plain.get("target_hidden_size") is None and "fc.weight" in tensors:
        plain["target_hidden_size"] = tensors["fc.weight"].shape[-1] // len(taps)
    config = DraftConfig.from_json(plain)
    _vocabulary(config, tensors, directory, notes)
    check_tensors(config, tensors, directory)
    return ImportedDraft(config, tensors, layout, tuple(notes))


def check_tensors(config: DraftConfig, tensors: dict[str, Tensor], where: object) -> None:
    """Every expected tensor, no other, each of its shape and kind, all numbers finite."""
    if "embed_tokens.weight" not in tensors:
        raise UserError(
            f"{where}: tensor embed_tokens.weight is missing: name the target with --target to take its embedding"
        )
    found = {name: (tuple(tensor.shape), tensor.is_floating_point()) for name, tensor in tensors.items()}
    for name in check_layout(config, found, where):
        meaning = next((text for part, text in _FOREIGN.items() if part in name), None)
        raise UserError(f"{where}: tensor {name} is not supported" + (f": {meaning}" if meaning else ""))
    for name, tensor in tensors.items():
        if name not in MAPS:
            check_finite(name, tensor, where)


def _published(stored: dict[str, Tensor], directory: Path, notes: list[str]) -> dict[str, Tensor]:
    """Stored names -> published names."""
    tensors: dict[str, Tensor] = {}
    prefixes = set()
    for name, tensor in stored.items():
        short = name
        for wrapper in _WRAPPERS:
            short = short.removeprefix(wrapper)
        if short.startswith("midlayer."):
            short = "layers.0." + short.removeprefix("midlayer.")
            prefixes.add("midlayer.*")
        elif short.startswith("layers.0."):
            prefixes.add("layers.0.*")
        if short in _TARGET_PARTS:
            notes.append(f"{name} is the target's and is left out")
        elif short.endswith("rotary_emb.inv_freq"):
            notes.append(f"{name} follows from rope_theta and is left out")
        elif short in tensors:
            raise UserError(f"{directory}: tensor {short} is there twice, once as {name}")
        else:
            tensors[short] = tensor
    notes.insert(0, f"layer names {' and '.join(sorted(prefixes)) or 'unknown'}, {len(stored)} tensors")
    return tensors


def _layout(source: dict[str, Any]) -> str:
    if "speculators_model_type" in source:
        return "speculators"
    if "_torchspec_version" in source:
        return "TorchSpec"
    if "Eagle3" in str(source.get("architectures")):
        return ARCHITECTURE
    return "EAGLE"


def _plain_config(source: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The flat published keys, whatever the layout."""
    if source.get("quantization_config") is not None:
        raise UserError(f"{directory}: config.json has quantization_config: a quantised draft is not supported")
    if source.get("norm_before_fc") or (source.get("eagle_config") or {}).get("norm_before_fc"):
        raise UserError(f"{directory}: config.json has norm_before_fc (tensor input_norm.weight), not supported")
    if "speculators_model_type" not in source:
        plain = dict(source)
        # EAGLE names the plain Llama class although the layer is its own; the tensors tell.
        plain["architectures"] = [ARCHITECTURE]
        return plain
    if source["speculators_model_type"] != "eagle3":
        raise UserError(f"{directory}: speculators_model_type is {source['speculators_model_type']!r}, not 'eagle3'")
    inner = source.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise UserError(f"{directory}: config.json has no transformer_layer_config")
    if inner.get("model_type") != "llama":
        raise UserError(f"{directory}: transformer_layer_config.model_type is {inner.get('model_type')!r}, not 'llama'")
    outer = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "fc_norm", "norm_output", LAYER_IDS)
    return {
        **{key: value for key, value in inner.items() if key != "tie_word_embeddings"},
        **{key: source[key] for key in outer if source.get(key) is not None},
        "tie_word_embeddings": source.get("tie_word_embeddings", False),
        "architectures": [ARCHITECTURE],
    }


def _fill_in(plain: dict[str, Any], tensors: dict[str, Tensor], notes: list[str], target: TargetParts | None) -> None:
    """Keys that the config leaves to a reader's default, from the tensors where they decide."""
    for key, marker in (("fc_norm", "fc_norm.0.weight"), ("attention_bias", "layers.0.self_attn.q_proj.bias")):
        if plain.get(key) is None and marker in tensors:
            plain[key] = True
            notes.append(f"{key} on, as tensor {marker} is there")
    query = tensors.get("layers.0.self_attn.q_proj.weight")
    heads = plain.get("num_attention_heads")
    if plain.get("head_dim") is None and query is not None and type(heads) is int:
        plain["head_dim"] = query.shape[0] // heads
    if plain.get("rope_theta") is None and plain.get("rope_parameters") is None:
        plain["rope_theta"] = 10000.0
        notes.append("rope_theta 10000, the Llama default, as none is given")
    head, embedding = tensors.get("lm_head.weight"), tensors.get("embed_tokens.weight")
    if "draft_vocab_size" in plain and plain["draft_vocab_size"] is None:
        notes.append("draft_vocab_size is null, for which SGLang takes the target's head: the stored head is taken")
    if plain.get("draft_vocab_size") is None and head is not None:
        plain["draft_vocab_size"] = head.shape[0]
    if embedding is None and target is not None and target.embedding is not None:
        tensors["embed_tokens.weight"] = target.embedding if head is None else target.embedding.to(head.dtype)
        notes.append("embed_tokens.weight is not there: the target's is taken")
    limit = plain.get("max_position_embeddings")
    if target is not None and limit != target.max_position:
        plain["max_position_embeddings"] = target.max_position
        notes.append(f"max_position_embeddings {limit} -> {target.max_position}, the target's")


def _taps(
    plain: dict[str, Any],
    layout: str,
    metadata: dict[str, str],
    asked: Convention | None,
    target: TargetParts | None,
    directory: Path,
    notes: list[str],
) -> tuple[int, ...]:
    """The taps in the "entering layer k" convention."""
    nested = plain.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state", True) is not True:
        raise UserError(f"{directory}: eagle_config.use_aux_hidden_state must be true for EAGLE-3")
    ids = nested.get(LAYER_IDS) or plain.get(LAYER_IDS)
    if ids is None:
        if target is None or target.default_taps is None:
            raise UserError(f"{directory}: config.json names no layer ids: name the target with --target")
        notes.append(f"no layer ids: the default of every reader, entering layers {list(target.default_taps)}")
        return target.default_taps
    if not isinstance(ids, list) or any(type(item) is not int for item in ids):
        raise UserError(f"{directory}: {LAYER_IDS} must be a list of integers, not {ids!r}")
    convention = asked or metadata.get("layer_ids") or ("entering" if layout == "speculators" else None)
    if convention not in ID_OFFSET:
        raise UserError(
            f"{directory}: layer ids {ids} may mean the stream that enters these layers (vLLM, ATOM, the published M3 "
            "draft) or leaves them (SGLang, SpecForge): say it with --layer-ids entering or --layer-ids output"
        )
    taps = tuple(item - ID_OFFSET[convention] for item in ids)
    notes.append(f"layer ids {ids} read as {convention}: entering layers {list(taps)}")
    return taps


def _vocabulary(config: DraftConfig, tensors: dict[str, Tensor], directory: Path, notes: list[str]) -> None:
    """A full vocabulary has no maps; a pruned one gets a missing t2d from d2t."""
    if not config.pruned:
        if "d2t" in tensors and tensors["d2t"].any():
            raise UserError(f"{directory}: tensor d2t maps ids, but the draft has the full vocabulary")
        if [tensors.pop(name, None) for name in ("d2t", "t2d")] != [None, None]:
            notes.append("trivial d2t and t2d of a full vocabulary are left out")
        return
    if "d2t" not in tensors:
        raise UserError(f"{directory}: tensor d2t is missing, though the vocabulary is pruned")
    tensors["d2t"] = tensors["d2t"].to(torch.int64)
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    if "t2d" not in tensors and ids.min() >= 0 and ids.max() < config.vocab_size:
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        notes.append("t2d is not there: it follows from d2t")
    tensors["t2d"] = tensors.get("t2d", torch.zeros(config.vocab_size, dtype=torch.bool)).to(torch.bool)
    check_vocabulary_map(tensors["d2t"], tensors["t2d"], config, directory)


def describe(draft: ImportedDraft) -> list[str]:
    """What was found, a line each."""
    config = draft.config
    on = [n for n in ("fc_norm", "norm_output", "norm_before_residual", "attention_bias") if getattr(config, n)]
    vocabulary = f"{config.draft_vocab_size} of {config.vocab_size} tokens" if config.pruned else "full vocabulary"
    attention = "MHA" if config.num_kv_heads == config.num_heads else f"GQA with {config.num_kv_heads} KV heads"
    return [
        f"layout {draft.layout}: hidden {config.hidden_size}, {config.num_heads} heads ({attention}), {vocabulary}",
        f"switches on: {', '.join(on) or 'none'}; taps entering layers {json.dumps(list(config.taps))}",
        *draft.notes,
    ]
