"""Sizes of a target from its config alone: parameters, tensors, bytes of the weights, bytes of the cache."""

from collections.abc import Mapping
from dataclasses import dataclass

from target_model.config import M3Config
from target_model.quantised_formats import Format
from target_model.tensor_names import tensor_specs


@dataclass(frozen=True)
class ParameterCount:
    """Counts over a published checkpoint.

    parts         parameters by part (routed_experts, attention, ...); their sum is `total`
    active        parameters that one token multiplies with: its experts only, the output head, no embedding look-up,
                  no vision
    weight_bytes  bytes in bf16, the router's fp32 tensors at 4 bytes
    """

    parts: dict[str, int]
    total: int
    active: int
    text_tensors: int
    vision_tensors: int
    weight_bytes: int


def bytes_text(size: int) -> str:
    """A size for people: in MB below 0.1 GB."""
    return f"{size / 10**9:.2f} GB" if size >= 10**8 else f"{size / 10**6:.2f} MB"


def count_parameters(config: M3Config) -> ParameterCount:
    """Counts what a checkpoint with this config holds."""
    parts: dict[str, int] = {}
    active = text = vision = size_bytes = 0
    for spec in tensor_specs(config):
        parts[spec.part] = parts.get(spec.part, 0) + spec.size
        size_bytes += spec.size * (4 if spec.kind == "fp32" else 2)
        if spec.is_vision:
            vision += 1
            continue
        text += 1
        if spec.part == "embed_tokens" or (spec.expert is not None and spec.expert >= config.experts_per_token):
            continue
        active += spec.size
    return ParameterCount(parts, sum(parts.values()), active, text, vision, size_bytes)


def weight_bytes(
    config: M3Config,
    element_size: int,
    *,
    language_only: bool = True,
    formats: Mapping[str, Format] | None = None,
) -> int:
    """Bytes of the loaded model with weights of `element_size` bytes; router and norms are kept in fp32.

    Parameters named in `formats` stay quantised; a scale of the whole tensor is kept once a row.
    """
    total = 0
    for spec in tensor_specs(config):
        form = (formats or {}).get(spec.destination)
        if language_only and spec.is_vision:
            continue
        if form is not None:
            total += form.bytes(spec.shape) + (4 * spec.shape[0] - 8 if form.tensor_scale else 0)
        else:
            # A head norm is kept once for each head that it serves.
            heads = spec.rows[1] - spec.rows[0] if spec.kind == "norm" and spec.rows else 1
            total += spec.size * heads * (element_size if spec.kind == "weight" else 4)
    return total


def cache_bytes_per_token(config: M3Config, element_size: int = 2, index_element_size: int = 2) -> int:
    """Bytes of K, V and index K that one token takes over all layers."""
    main = config.num_layers * 2 * config.num_kv_heads * config.head_dim * element_size
    return main + sum(config.sparse_layers) * config.index_dim * index_element_size
