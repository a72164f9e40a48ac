"""MiniMax-M3's `config.json`, read once into frozen dataclasses and checked there.

Two spellings exist: the published one (`sparse_attention_config`, `moe_layer_freq`, `rope_theta`) and the flat one
that the transformers package writes (`index_topk_blocks`, `layer_types`, `mlp_layer_types`, `rope_parameters`). Both
are read; where both are present they must agree.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from target_model.config_reader import Section
from target_model.errors import UserError

MODEL_TYPES = ("minimax_m3_vl", "minimax_m3_vl_text", "minimax_m2")


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

    def __post_init__(self) -> None:
        self._check_shapes()
        self._check_blocks()
        self._check_reuse()

    @classmethod
    def from_json(cls, source: dict[str, Any] | str | os.PathLike) -> "M3Config":
        """From parsed JSON, a `config.json`, or a directory that holds one. Raises UserError naming the field."""
        if isinstance(source, dict):
            return _read(source, where="config")
        path = Path(source)
        if path.is_dir():
            path = path / "config.json"
        return _read(_load_json(path), where=str(path))

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


def _read(document: dict[str, Any], where: str) -> M3Config:
    top = Section(document, where)
    top.require("model_type", MODEL_TYPES)
    if "quantization_config" in document:
        raise UserError(
            f"{where}: quantised checkpoints (quantization_config) cannot be loaded yet: use the bf16 weights"
        )
    text = top.section("text_config") if "text_config" in document else top
    _refuse_unsupported(top, text)
    try:
        return M3Config(
            **_read_sizes(text),
            **_read_experts(text),
            **_read_blocks(text, top),
            **_read_tokens(text, top),
            vision=_read_vision(top, text) if "vision_config" in document else None,
        )
    except UserError as error:
        raise error if str(error).startswith(where) else UserError(f"{where}: {error}") from None


def _refuse_unsupported(top: Section, text: Section) -> None:
    """Settings that change the arithmetic in a way this implementation does not have."""
    text.require("model_type", MODEL_TYPES)
    for section in (top, text):
        section.require("tie_word_embeddings", (False,))
    text.require("hidden_act", ("swigluoai", "silu"))
    text.require("use_gemma_norm", (True,))
    text.require("attention_output_gate", (False,))
    text.require("use_qk_norm", (True,))
    text.require("qk_norm_type", ("per_head",))
    text.require("scoring_func", ("sigmoid",))
    text.require("use_routing_bias", (True,))
    text.require("n_shared_experts", (1,))
    text.require("rope_scaling", (None,))
    text.section("rope_parameters").require("rope_type", ("default",))
    text.section("sparse_attention_config").require("sparse_score_type", ("max",))


def _read_sizes(text: Section) -> dict[str, Any]:
    rope = text.section("rope_parameters")
    head_dim = text.integer("head_dim")
    factors = [s.number("partial_rotary_factor") for s in (text, rope) if "partial_rotary_factor" in s]
    rotary = [("partial_rotary_factor", int(factor * head_dim)) for factor in factors]
    if "rotary_dim" in text:
        rotary.append(("rotary_dim", text.integer("rotary_dim")))
    return {
        "hidden_size": text.integer("hidden_size"),
        "num_layers": text.integer("num_hidden_layers"),
        "num_heads": text.integer("num_attention_heads"),
        "num_kv_heads": text.integer("num_key_value_heads"),
        "head_dim": head_dim,
        "vocab_size": text.integer("vocab_size"),
        "rms_norm_eps": text.number("rms_norm_eps"),
        "rope_theta": text.agreed(
            "rope_theta", [s.found("rope_theta", float) for s in (text, rope) if "rope_theta" in s]
        ),
        "rotary_dim": text.agreed("rotary_dim", rotary),
        "max_position": text.integer("max_position_embeddings"),
    }


def _read_experts(text: Section) -> dict[str, Any]:
    layers = text.integer("num_hidden_layers")
    moe = [text.flags("moe_layer_freq", layers)] if "moe_layer_freq" in text else []
    if "mlp_layer_types" in text:
        moe.append(text.kinds("mlp_layer_types", {"sparse": True, "dense": False}))
    return {
        "dense_width": text.integer("dense_intermediate_size"),
        "expert_width": text.integer("intermediate_size"),
        "shared_width": text.integer("shared_intermediate_size"),
        "num_experts": text.integer("num_local_experts"),
        "experts_per_token": text.integer("num_experts_per_tok"),
        "routed_scaling_factor": text.number("routed_scaling_factor"),
        "swiglu_alpha": text.number("swiglu_alpha"),
        "swiglu_limit": text.number("swiglu_limit"),
        "swiglu_beta": text.number("swiglu_beta", default=1.0),
        "moe_layers": text.agreed("moe_layer_freq", moe),
    }


def _read_blocks(text: Section, top: Section) -> dict[str, Any]:
    sparse = text.section("sparse_attention_config")
    layers = text.integer("num_hidden_layers")
    choices = []
    if "sparse_attention_freq" in sparse:
        freq = sparse.flags("sparse_attention_freq", layers)
        enabled = sparse.boolean("use_sparse_attention", default=True)
        choices.append((freq[0], freq[1] if enabled else (False,) * layers))
    if "layer_types" in text:
        choices.append(text.kinds("layer_types", {"minimax_m3_sparse": True, "full_attention": False}))
    sparse_layers = text.agreed("sparse_attention_freq", choices)
    if "sparse_disable_index_value" in sparse:
        name, disabled = sparse.flags("sparse_disable_index_value", layers)
        if any(uses and not off for uses, off in zip(sparse_layers, disabled, strict=True)):
            raise UserError(f"{name} must be 1 on every sparse layer: an index value path is not supported")

    def either(flat: str, published: str) -> int:
        found = [s.found(n, int) for s, n in ((text, flat), (sparse, published)) if n in s]
        return text.agreed(published, found)

    def option(name: str) -> dict[str, Any]:
        section = text if name in text else top
        return {name: section[name]} if name in section else {}

    reuse = option("use_index_cache") | option("index_topk_freq") | option("index_topk_pattern")
    reuse |= option("index_skip_topk_offset")
    return dict(
        sparse_layers=sparse_layers,
        block_size=either("index_block_size", "sparse_block_size"),
        top_k_blocks=either("index_topk_blocks", "sparse_topk_blocks"),
        num_index_heads=either("index_n_heads", "sparse_num_index_heads"),
        index_dim=either("index_head_dim", "sparse_index_dim"),
        local_blocks=either("index_local_blocks", "sparse_local_block"),
        init_blocks=sparse.integer("sparse_init_block", default=0, least=0),
        **reuse,
    )


def _read_tokens(text: Section, top: Section) -> dict[str, Any]:
    eos_section = text if "eos_token_id" in text else top
    eos = eos_section.value("eos_token_id")
    if isinstance(eos, int):
        eos = [eos]
    if not isinstance(eos, list) or not eos or not all(type(token) is int for token in eos):
        raise UserError(f"{eos_section.name('eos_token_id')} must be a token id or a list of them, not {eos!r}")
    bos_section = text if "bos_token_id" in text else top

    def placeholder(kind: str) -> int | None:
        found = [top.found(n, int) for n in (f"{kind}_token_index", f"{kind}_token_id") if n in top]
        return top.agreed(f"{kind}_token_index", found) if found else None

    return {
        "bos_token_id": bos_section.integer("bos_token_id", least=0),
        "eos_token_ids": tuple(eos),
        "image_token_id": placeholder("image"),
        "video_token_id": placeholder("video"),
    }


def _read_vision(top: Section, text: Section) -> VisionConfig:
    vision = top.section("vision_config")
    merge = top.section("img_token_compression_config")
    rope = vision.section("rope_parameters")
    vision.require("hidden_act", ("gelu",))

    def size(name: str) -> int:
        return top.agreed(name, [section.found(name, int) for section in (vision, merge) if name in section])

    return VisionConfig(
        hidden_size=vision.integer("hidden_size"),
        intermediate_size=vision.integer("intermediate_size"),
        num_layers=vision.integer("num_hidden_layers"),
        num_heads=vision.integer("num_attention_heads"),
        num_channels=vision.integer("num_channels", default=3),
        image_size=vision.integer("image_size"),
        patch_size=vision.integer("patch_size"),
        temporal_patch_size=size("temporal_patch_size"),
        spatial_merge_size=size("spatial_merge_size"),
        projector_hidden_size=top.integer("projector_hidden_size", default=text.integer("hidden_size")),
        rope_theta=(vision if "rope_theta" in vision else rope).number("rope_theta", default=10000.0),
        layer_norm_eps=vision.number("layer_norm_eps", default=1e-5),
        segment_max_frames=vision.integer("vision_segment_max_frames", default=4),
    )
