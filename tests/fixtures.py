"""Tiny targets for tests: random weights, no trivial norm, in memory or as a published checkpoint.

T0, the default: 6 layers (2 dense, 4 block-sparse with experts), hidden 64, 4 query heads on 2 KV heads, block 8,
top-k 2, vocabulary 300, context 256. Its 6 layers have no default taps: name them, for instance (1, 3, 5).
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from target_model.checkpoint import fill_model
from target_model.config import M3Config, VisionConfig
from target_model.model import TargetModel
from target_model.tensor_names import TensorSpec, tensor_specs

T0 = {
    "hidden_size": 64,
    "num_layers": 6,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rotary_dim": 8,
    "max_position": 256,
    "dense_width": 128,
    "expert_width": 32,
    "shared_width": 48,
    "num_experts": 4,
    "experts_per_token": 2,
    "routed_scaling_factor": 2.0,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "swiglu_beta": 1.0,
    "block_size": 8,
    "top_k_blocks": 2,
    "init_blocks": 0,
    "local_blocks": 1,
    "bos_token_id": 258,
    "eos_token_ids": (257,),
}
DENSE_LAYERS = 2
TINY_VISION = VisionConfig(
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=2,
    num_channels=3,
    image_size=56,
    patch_size=14,
    temporal_patch_size=2,
    spatial_merge_size=2,
    projector_hidden_size=40,
    rope_theta=10000.0,
    layer_norm_eps=1e-5,
    segment_max_frames=4,
)


def tiny_config(**overrides: Any) -> M3Config:
    """T0's configuration with fields of M3Config replaced; layer kinds and index heads follow from the others."""
    values = T0 | overrides
    layers = values["num_layers"]
    kinds = tuple(layer >= DENSE_LAYERS for layer in range(layers))
    derived = {
        "sparse_layers": kinds,
        "moe_layers": kinds,
        "num_index_heads": values["num_kv_heads"],
        "index_dim": values["head_dim"],
    }
    return M3Config(**(derived | values))


def random_tensors(config: M3Config, seed: int = 0) -> list[tuple[TensorSpec, Tensor]]:
    """Every tensor of the published layout, in bf16 where a checkpoint has bf16."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for spec in tensor_specs(config):
        noise = torch.randn(spec.shape, generator=generator)
        if spec.kind == "norm":
            value = 0.4 * noise
        elif len(spec.shape) == 1:
            value = 0.2 * noise
        elif spec.part == "embed_tokens":
            value = noise
        else:
            # Larger than a trained model's, so that attention is sharp and experts and blocks are chosen far from ties.
            value = noise * (1.5 / spec.size**0.5 * spec.shape[0] ** 0.5)
        tensors.append((spec, value if spec.kind == "fp32" else value.bfloat16()))
    return tensors


def random_target(seed: int = 0, *, language_only: bool = True, **overrides: Any) -> TargetModel:
    """A T0 in fp32 on the CPU, the same as loading `write_checkpoint(tiny_config(**overrides), directory, seed)`."""
    config = tiny_config(**overrides)
    tensors = [entry for entry in random_tensors(config, seed) if not (language_only and entry[0].is_vision)]
    return fill_model(config, tensors, vision=not language_only)


def write_checkpoint(config: M3Config, directory: Path, seed: int = 0, shards: int = 2) -> Path:
    """Writes config, index and shards in the published layout (no tokenizer); returns the directory."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = [(spec.name, tensor) for spec, tensor in random_tensors(config, seed)]
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(tensors[shard::shards])
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(published_json(config), indent=1))
    return directory


def published_json(config: M3Config) -> dict[str, Any]:
    """The config in the published spelling."""
    flags = [int(sparse) for sparse in config.sparse_layers]
    text = {
        "model_type": "minimax_m2",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.expert_width,
        "dense_intermediate_size": config.dense_width,
        "shared_intermediate_size": config.shared_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "use_gemma_norm": True,
        "rope_theta": config.rope_theta,
        "rotary_dim": config.rotary_dim,
        "partial_rotary_factor": config.rotary_dim / config.head_dim,
        "hidden_act": "swigluoai",
        "swiglu_alpha": config.swiglu_alpha,
        "swiglu_limit": config.swiglu_limit,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": config.routed_scaling_factor,
        "moe_layer_freq": [int(moe) for moe in config.moe_layers],
        "tie_word_embeddings": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": config.index_dim,
            "sparse_num_index_heads": config.num_index_heads,
            "sparse_topk_blocks": config.top_k_blocks,
            "sparse_block_size": config.block_size,
            "sparse_score_type": "max",
            "sparse_init_block": config.init_blocks,
            "sparse_local_block": config.local_blocks,
            "sparse_attention_freq": flags,
            "sparse_disable_index_value": flags,
        },
    }
    document = {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "tie_word_embeddings": False,
        "text_config": text,
    }
    for name, token in (("image_token_index", config.image_token_id), ("video_token_index", config.video_token_id)):
        if token is not None:
            document[name] = token
    if config.use_index_cache:
        text |= {"use_index_cache": True, "index_topk_freq": config.index_topk_freq}
    vision = config.vision
    if vision is not None:
        document["projector_hidden_size"] = vision.projector_hidden_size
        document["vision_config"] = {
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_hidden_layers": vision.num_layers,
            "num_attention_heads": vision.num_heads,
            "num_channels": vision.num_channels,
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "spatial_merge_size": vision.spatial_merge_size,
            "rope_theta": vision.rope_theta,
            "hidden_act": "gelu",
            "layer_norm_eps": vision.layer_norm_eps,
            "vision_segment_max_frames": vision.segment_max_frames,
        }
    return document
