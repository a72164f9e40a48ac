"""A draft as each engine reads it: names, config fields and layer ids by `engines.py`, checked by reading it back."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_model.checkpoint import expected_shapes
from draft_model.config import DraftConfig, read_json
from draft_model.engines import ENGINES, ID_OFFSET, LAYER_IDS, Engine, field_problems
from draft_model.importing import ImportedDraft, read_draft
from draft_model.weight_files import read_weights, write_weights
from target_model.errors import UserError, atomic_directory

FORMAT_VERSION = "1"
# speculators' release whose classes the config is written for.
SPECULATORS_VERSION = "0.9.0"
CHAIN = 3


@dataclass(frozen=True)
class Verifier:
    """The target as exports name it; an imported draft may not know its own."""

    name: str | None
    architectures: list[str]
    max_position: int


def export_draft(
    draft: ImportedDraft, engine_name: str, directory: Path, verifier: Verifier, card: str
) -> dict[str, tuple[int, ...]]:
    """Writes config.json, model.safetensors and README.md (`card`), whole or not at all; returns name -> shape.

    Raises UserError when the engine cannot serve this draft.
    """
    engine = find_engine(engine_name)
    config = replace(draft.config, max_position=verifier.max_position)
    for reason in obstacles(config, engine):
        raise UserError(f"{engine.name} cannot serve this draft: {reason}")
    tensors = {_with_prefix(engine.layer_prefixes[0], name): tensor for name, tensor in draft.tensors.items()}
    metadata = {
        "engine": engine.name,
        "layer_ids": engine.layer_ids,
        "format_version": FORMAT_VERSION,
        "taps_entering": json.dumps(list(config.taps)),
    }
    if verifier.name is not None:
        metadata["target"] = verifier.name
    floating = next(tensor for tensor in tensors.values() if tensor.is_floating_point())
    written = engine_config(config, engine, verifier) | {"dtype": str(floating.dtype).removeprefix("torch.")}
    with atomic_directory(directory) as work:
        (work / "config.json").write_text(json.dumps(written, indent=1) + "\n")
        write_weights(tensors, work, metadata)
        (work / "README.md").write_text(card)
        _load_back(work, engine, config, draft.tensors)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def find_engine(name: str) -> Engine:
    if name not in ENGINES:
        raise UserError(f"unknown engine {name!r}: expected one of {', '.join(ENGINES)}")
    return ENGINES[name]


def _with_prefix(prefix: str, published: str) -> str:
    if not published.startswith("layers.0."):
        return published
    return prefix + published.removeprefix("layers.0.")


def obstacles(config: DraftConfig, engine: Engine) -> list[str]:
    """What this draft needs and the engine does not do."""
    found = []
    for name, field in engine.fields.items():
        if field.use == "ignored" and getattr(config, name):
            found.append(f"it does not read {name}, which this draft needs")
    if config.pruned and not engine.reads_d2t:
        found.append("it does not read tensor d2t, which maps this draft's pruned vocabulary")
    if engine.equal_widths and config.target_hidden_size != config.hidden_size:
        found.append(
            f"tensor fc.weight must take states of the draft's own width {config.hidden_size}, not of "
            f"{config.target_hidden_size}"
        )
    if engine.taps is not None and config.num_aux != engine.taps:
        found.append(f"tensor fc.weight must take {engine.taps} taps, not {config.num_aux}")
    if min(config.taps) + ID_OFFSET[engine.layer_ids] < 0:
        found.append("its layer ids mean layer outputs, and nothing comes out of a layer before layer 0")
    return found


def engine_config(config: DraftConfig, engine: Engine, verifier: Verifier) -> dict[str, Any]:
    """config.json in the engine's layout."""
    ids = [tap + ID_OFFSET[engine.layer_ids] for tap in config.taps]
    plain = config.to_json()
    if engine.name != "speculators":
        plain["eagle_config"] = {"use_aux_hidden_state": True, LAYER_IDS: ids}
        return plain
    sizes = (
        "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim num_hidden_layers hidden_act"
    )
    rest = "rms_norm_eps rope_theta max_position_embeddings vocab_size tie_word_embeddings attention_bias"
    layer = {key: plain[key] for key in f"model_type {sizes} {rest}".split()}
    layer |= {"mlp_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": CHAIN,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier.name, "architectures": verifier.architectures},
        },
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        LAYER_IDS: ids,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "transformer_layer_config": layer,
    }


def _load_back(directory: Path, engine: Engine, config: DraftConfig, tensors: dict[str, Tensor]) -> None:
    """The export read like anyone's: same config, and every tensor bit for bit."""
    problems = check_directory(directory, engine.name)
    back = read_draft(directory)
    if back.config != config:
        problems.append(f"the config reads back as {back.config}")
    if back.tensors.keys() != tensors.keys():
        problems.append(f"tensors {sorted(back.tensors.keys() ^ tensors.keys())} are not on both sides")
    problems += [
        f"tensor {name} reads back different"
        for name, tensor in tensors.items()
        if name in back.tensors
        and (tensor.dtype != back.tensors[name].dtype or not torch.equal(tensor, back.tensors[name]))
    ]
    if problems:
        raise RuntimeError(f"the export for {engine.name} is wrong: {'; '.join(problems)}")


def check_directory(directory: Path, engine_name: str | None = None) -> list[str]:
    """Everything that keeps an engine from loading `directory` as it was meant; empty when all is well.

    Without a name the engine is the one that the weights' metadata tells, else `hf`.
    """
    stored, metadata = read_weights(directory)
    engine = find_engine(engine_name or metadata.get("engine") or "hf")
    source = read_json(directory / "config.json")
    problems = field_problems(engine, source)
    if metadata.get("layer_ids", engine.layer_ids) != engine.layer_ids:
        problems.append(
            f"its layer ids were written as {metadata['layer_ids']} for {metadata.get('engine')}, "
            f"{engine.name} takes them as {engine.layer_ids}"
        )
    try:
        draft = read_draft(directory, layer_ids=engine.layer_ids)
    except UserError as error:
        return [*problems, str(error)]
    problems += obstacles(draft.config, engine)
    prefixes = [prefix for prefix in engine.layer_prefixes if any(name.startswith(prefix) for name in stored)]
    prefix = prefixes[0] if prefixes else engine.layer_prefixes[0]
    expected = {_with_prefix(prefix, name) for name in expected_shapes(draft.config)}
    problems += [f"tensor {name} is missing under this name" for name in sorted(expected - stored.keys())]
    problems += [f"tensor {name} is not read" for name in sorted(stored.keys() - expected)]
    kinds = {tensor.dtype for tensor in stored.values() if tensor.is_floating_point()}
    if len(kinds) > 1:
        problems.append(f"tensors of several dtypes: {', '.join(sorted(map(str, kinds)))}")
    if "d2t" in stored and stored["d2t"].dtype != torch.int64:
        problems.append(f"tensor d2t has dtype {stored['d2t'].dtype}, expected int64")
    return problems
