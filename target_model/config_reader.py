"""From the JSON of a `config.json`, in either spelling, to the fields of `M3Config`."""

from typing import Any

from target_model.errors import UserError
from target_model.json_section import Section
from target_model.quantised_config import Quantisation, read_quantisation

MODEL_TYPES = ("minimax_m3_vl", "minimax_m3_vl_text", "minimax_m2")


def read_fields(document: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of `M3Config`, `vision` as the fields of `VisionConfig` or None. Raises UserError naming the field."""
    top = Section(document, where)
    top.require("model_type", MODEL_TYPES)
    text = top.section("text_config") if "text_config" in document else top
    _refuse_unsupported(top, text)
    return {
        **_read_sizes(text),
        **_read_experts(text),
        **_read_blocks(text),
        **_read_reuse(text, top),
        **_read_tokens(text, top),
        "quantisation": _read_quantisation(top, text, where),
        "vision": _read_vision(top, text) if "vision_config" in document else None,
    }


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
    thetas = [s.found("rope_theta", float) for s in (text, rope) if "rope_theta" in s]
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
        "rope_theta": text.agreed("rope_theta", thetas),
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


def _read_blocks(text: Section) -> dict[str, Any]:
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

    return {
        "sparse_layers": sparse_layers,
        "block_size": either("index_block_size", "sparse_block_size"),
        "top_k_blocks": either("index_topk_blocks", "sparse_topk_blocks"),
        "num_index_heads": either("index_n_heads", "sparse_num_index_heads"),
        "index_dim": either("index_head_dim", "sparse_index_dim"),
        "local_blocks": either("index_local_blocks", "sparse_local_block"),
        "init_blocks": sparse.integer("sparse_init_block", default=0, least=0),
    }


def _read_reuse(text: Section, top: Section) -> dict[str, Any]:
    """Run-time options, which callers put beside either config: absent ones keep the defaults of M3Config."""
    found: dict[str, Any] = {}
    for section in (top, text):
        if "use_index_cache" in section:
            found["use_index_cache"] = section.boolean("use_index_cache", default=False)
        if "index_topk_freq" in section:
            found["index_topk_freq"] = section.integer("index_topk_freq")
        if "index_skip_topk_offset" in section:
            found["index_skip_topk_offset"] = section.integer("index_skip_topk_offset", least=0)
        if section.get("index_topk_pattern") is not None:
            found["index_topk_pattern"] = section.text("index_topk_pattern")
    return found


def _read_quantisation(top: Section, text: Section, where: str) -> Quantisation | None:
    sections = [section.get("quantization_config") for section in (top, text)]
    return next((read_quantisation(section, where) for section in sections if section is not None), None)


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


def _read_vision(top: Section, text: Section) -> dict[str, Any]:
    vision = top.section("vision_config")
    merge = top.section("img_token_compression_config")
    rope = vision.section("rope_parameters")
    vision.require("hidden_act", ("gelu",))

    def size(name: str) -> int:
        return top.agreed(name, [section.found(name, int) for section in (vision, merge) if name in section])

    return {
        "hidden_size": vision.integer("hidden_size"),
        "intermediate_size": vision.integer("intermediate_size"),
        "num_layers": vision.integer("num_hidden_layers"),
        "num_heads": vision.integer("num_attention_heads"),
        "num_channels": vision.integer("num_channels", default=3),
        "image_size": vision.integer("image_size"),
        "patch_size": vision.integer("patch_size"),
        "temporal_patch_size": size("temporal_patch_size"),
        "spatial_merge_size": size("spatial_merge_size"),
        "projector_hidden_size": top.integer("projector_hidden_size", default=text.integer("hidden_size")),
        "rope_theta": (vision if "rope_theta" in vision else rope).number("rope_theta", default=10000.0),
        "layer_norm_eps": vision.number("layer_norm_eps", default=1e-5),
        "segment_max_frames": vision.integer("vision_segment_max_frames", default=4),
    }
