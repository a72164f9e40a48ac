"""MiniMax-M3's `config.json`, read once into frozen dataclasses and checked there.

Two spellings exist: the published one (`sparse_attention_config`, `moe_layer_freq`, `rope_theta`) and the flat one
that the transformers package writes (`index_topk_blocks`, `layer_types`, `mlp_layer_types`, `rope_parameters`). Both
are read; where both are present they must agree.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from target_model.config_reader import read_fields
from target_model.errors import UserError
from target_model.quantised_config import Quantisation


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower, the projector and the patch merger."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_channels: int
    image_size: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    projector_hidden_size: int
    rope_theta: float
    layer_norm_eps: float
    segment_max_frames: int


@dataclass(frozen=True)
class M3Config:
    """Everything about a target that shapes its tensors or its arithmetic.

    dense_width, expert_width, shared_width   inner widths of the dense MLP, of one routed expert, of the shared expert
    sparse_layers, moe_layers                 per layer: block-sparse attention (else full), mixture of experts (else
                                              dense MLP)
    block_size                                tokens in a sparse block = slots in a cache page
    top_k_blocks                              blocks a query attends to, the forced ones (init_blocks, local_blocks)
                                              counted
    eos_token_ids                             every id that ends an answer
    use_index_cache, index_topk_*             run-time reuse of the block choice between sparse layers (lossy), see
                                              `reuses_blocks`
    quantisation                              how the checkpoint's weights are stored; None: in bf16
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    max_position: int
    dense_width: int
    expert_width: int
    shared_width: int
    num_experts: int
    experts_per_token: int
    routed_scaling_factor: float
    swiglu_alpha: float
    swiglu_limit: float
    swiglu_beta: float
    sparse_layers: tuple[bool, ...]
    moe_layers: tuple[bool, ...]
    block_size: int
    top_k_blocks: int
    num_index_heads: int
    index_dim: int
    init_blocks: int
    local_blocks: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    image_token_id: int | None = None
    video_token_id: int | None = None
    vision: VisionConfig | None = None
    use_index_cache: bool = False
    index_topk_freq: int = 1
    index_topk_pattern: str | None = None
    index_skip_topk_offset: int = 0
    quantisation: Quantisation | None = None

    def __post_init__(self) -> None:
        self._check_shapes()
        self._check_blocks()
        self._check_reuse()

    @classmethod
    def from_json(cls, source: dict[str, Any] | str | os.PathLike) -> "M3Config":
        """From parsed JSON, a `config.json`, or a directory that holds one. Raises UserError naming the field."""
        if isinstance(source, dict):
            document, where = source, "config"
        else:
            path = Path(source)
            path = path / "config.json" if path.is_dir() else path
            document, where = _load_json(path), str(path)
        fields = read_fields(document, where)
        vision = fields.pop("vision")
        try:
            return cls(**fields, vision=None if vision is None else VisionConfig(**vision))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    def check_taps(self, taps: Sequence[int]) -> None:
        """Raises UserError unless the taps name layers of this target, each once, in ascending order."""
        layers = self.num_layers
        if list(taps) != sorted(set(taps)) or any(not 0 <= tap < layers for tap in taps):
            raise UserError(f"taps {tuple(taps)} must be distinct, ascending layers between 0 and {layers - 1}")

    @property
    def reuses_blocks(self) -> tuple[bool, ...]:
        """Per layer: it takes the block choice of the sparse layer before it. Ranks count sparse layers only."""
        flags, rank = [], 0
        for sparse in self.sparse_layers:
            flags.append(sparse and self._reuses(rank))
            rank += sparse
        return tuple(flags)

    def _reuses(self, rank: int) -> bool:
        if not self.use_index_cache:
            return False
        if self.index_topk_pattern is not None:
            return self.index_topk_pattern[rank : rank + 1] == "S"
        return max(rank - self.index_skip_topk_offset, 0) % self.index_topk_freq != 0

    def _check_shapes(self) -> None:
        for name in ("sparse_layers", "moe_layers"):
            if len(getattr(self, name)) != self.num_layers:
                raise UserError(
                    f"{name} has {len(getattr(self, name))} entries, num_hidden_layers is {self.num_layers}"
                )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_attention_heads {self.num_heads} is no multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise UserError(f"rotary_dim {self.rotary_dim} must be even and at most head_dim {self.head_dim}")
        if self.experts_per_token > self.num_experts:
            raise UserError(
                f"num_experts_per_tok {self.experts_per_token} exceeds num_local_experts {self.num_experts}"
            )
        for name in ("bos_token_id", "image_token_id", "video_token_id"):
            self._check_token(name, getattr(self, name))
        for token in self.eos_token_ids:
            self._check_token("eos_token_id", token)

    def _check_token(self, name: str, token: int | None) -> None:
        if token is not None and not 0 <= token < self.vocab_size:
            raise UserError(f"{name} {token} lies outside the vocabulary of {self.vocab_size}")

    def _check_blocks(self) -> None:
        if self.num_index_heads != self.num_kv_heads:
            raise UserError(
                f"sparse_num_index_heads {self.num_index_heads} must equal num_key_value_heads {self.num_kv_heads}: "
                "each index head chooses the blocks of one KV head"
            )
        if self.index_dim != self.head_dim:
            raise UserError(f"sparse_index_dim {self.index_dim} must equal head_dim {self.head_dim}")
        if self.init_blocks + self.local_blocks > self.top_k_blocks:
            raise UserError(
                f"sparse_init_block {self.init_blocks} + sparse_local_block {self.local_blocks} "
                f"exceed sparse_topk_blocks {self.top_k_blocks}"
            )

    def _check_reuse(self) -> None:
        if self.index_topk_freq <= 0:
            raise UserError(f"index_topk_freq must be at least 1, not {self.index_topk_freq}")
        if self.index_skip_topk_offset < 0:
            raise UserError(f"index_skip_topk_offset must be at least 0, not {self.index_skip_topk_offset}")
        if self.use_index_cache and (self.index_topk_pattern or "").startswith("S"):
            raise UserError("index_topk_pattern starts with 'S', but the first sparse layer has no choice to reuse")


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The layers whose input the draft reads when nothing else is said: (2, n // 2, n - 3).

    Raises UserError below 7 layers, where the rule repeats or disorders them.
    """
    if num_layers < 7:
        raise UserError(
            f"a target of {num_layers} layers has no default taps (7 layers are needed): name them explicitly"
        )
    return (2, num_layers // 2, num_layers - 3)


def _load_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} must hold a JSON object")
    return document
