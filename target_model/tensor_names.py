"""The one table of checkpoint tensors: published name, shape, and where each goes in the model.

Everything that needs to know what a checkpoint holds reads this table: the loader, the parameter counts, the tests. It
needs the config alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from target_model.config import M3Config, VisionConfig

# A language-only load recognises these tensors by name and shape and leaves them on disk.
VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")
TEXT = "language_model.model."
# (start, stop) in each dimension of a tensor.
Region = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint.

    part         the group it is counted in
    kind         "weight": stored and kept in the model's dtype; "norm": stored as w, kept in fp32 as 1 + w; "fp32":
                 fp32 on both sides
    destination  name of the model's parameter; those of the vision side begin with "vision."
    expert       index along the parameter's first dimension, if it stacks experts
    rows         (start, stop) in the dimension after that, if the parameter packs several tensors; a norm fills each
                 of its rows
    """

    name: str
    shape: tuple[int, ...]
    part: str
    kind: str = "weight"
    destination: str = ""
    expert: int | None = None
    rows: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        product = 1
        for extent in self.shape:
            product *= extent
        return product

    @property
    def layer(self) -> int | None:
        """Number of its decoder layer, None for embedding, final norm, head and vision."""
        first, _, rest = self.destination.partition(".")
        return int(rest.partition(".")[0]) if first == "layers" else None

    @property
    def is_vision(self) -> bool:
        """A tensor that a language-only model does not take."""
        return self.name.startswith(VISION_PREFIXES)


def tensor_specs(config: M3Config) -> Iterator[TensorSpec]:
    """Every tensor of a published checkpoint, text first, then vision when the config has a tower."""
    yield from text_specs(config)
    if config.vision is not None:
        yield from vision_specs(config.vision, config.hidden_size)


def text_specs(config: M3Config) -> Iterator[TensorSpec]:
    """The tensors of the language model."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    yield TensorSpec(
        f"{TEXT}embed_tokens.weight", (vocabulary, hidden), "embed_tokens", destination="embed_tokens.weight"
    )
    for layer in range(config.num_layers):
        yield from _attention_specs(config, layer)
        yield from _moe_specs(config, layer) if config.moe_layers[layer] else _dense_specs(config, layer)
    yield TensorSpec(f"{TEXT}norm.weight", (hidden,), "norms", "norm", "norm.scale")
    yield TensorSpec("language_model.lm_head.weight", (vocabulary, hidden), "lm_head", destination="lm_head.weight")


def _attention_specs(config: M3Config, layer: int) -> Iterator[TensorSpec]:
    prefix, target = f"{TEXT}layers.{layer}.", f"layers.{layer}."
    hidden, dim = config.hidden_size, config.head_dim
    for norm, scale in (("input_layernorm", "attention_scale"), ("post_attention_layernorm", "mlp_scale")):
        yield TensorSpec(f"{prefix}{norm}.weight", (hidden,), "norms", "norm", f"{target}{scale}")
    # Packed columns: the heads that are normalised and rotated stand together, V comes last.
    packed = [("q", config.num_heads, "attention"), ("k", config.num_kv_heads, "attention")]
    if config.sparse_layers[layer]:
        packed += [("index_q", config.num_index_heads, "indexer"), ("index_k", 1, "indexer")]
    head = 0
    for name, heads, part in packed:
        rows = (head * dim, (head + heads) * dim)
        weight, norm = f"{prefix}self_attn.{name}_proj.weight", f"{prefix}self_attn.{name}_norm.weight"
        yield TensorSpec(weight, (heads * dim, hidden), part, destination=f"{target}attention.packed", rows=rows)
        yield TensorSpec(norm, (dim,), "norms", "norm", f"{target}attention.head_scale", rows=(head, head + heads))
        head += heads
    rows = (head * dim, (head + config.num_kv_heads) * dim)
    yield TensorSpec(
        f"{prefix}self_attn.v_proj.weight",
        (config.num_kv_heads * dim, hidden),
        "attention",
        destination=f"{target}attention.packed",
        rows=rows,
    )
    yield TensorSpec(
        f"{prefix}self_attn.o_proj.weight",
        (hidden, config.num_heads * dim),
        "attention",
        destination=f"{target}attention.out",
    )


def _dense_specs(config: M3Config, layer: int) -> Iterator[TensorSpec]:
    prefix = f"{TEXT}layers.{layer}.mlp."
    yield from _mlp_specs(prefix, config, config.dense_width, "dense_mlp", f"layers.{layer}.mlp.")


def _mlp_specs(prefix: str, config: M3Config, width: int, part: str, target: str) -> Iterator[TensorSpec]:
    hidden = config.hidden_size
    w13, w2 = f"{target}w13", f"{target}w2"
    yield TensorSpec(f"{prefix}gate_proj.weight", (width, hidden), part, destination=w13, rows=(0, width))
    yield TensorSpec(f"{prefix}up_proj.weight", (width, hidden), part, destination=w13, rows=(width, 2 * width))
    yield TensorSpec(f"{prefix}down_proj.weight", (hidden, width), part, destination=w2)


def _moe_specs(config: M3Config, layer: int) -> Iterator[TensorSpec]:
    prefix, target = f"{TEXT}layers.{layer}.block_sparse_moe.", f"layers.{layer}.mlp."
    hidden, width, experts = config.hidden_size, config.expert_width, config.num_experts
    yield TensorSpec(f"{prefix}gate.weight", (experts, hidden), "router", "fp32", f"{target}gate")
    yield TensorSpec(f"{prefix}e_score_correction_bias", (experts,), "router", "fp32", f"{target}gate_bias")
    for expert in range(experts):
        for name, shape, destination, rows in (
            ("w1", (width, hidden), "w13", (0, width)),
            ("w3", (width, hidden), "w13", (width, 2 * width)),
            ("w2", (hidden, width), "w2", None),
        ):
            yield TensorSpec(
                f"{prefix}experts.{expert}.{name}.weight",
                shape,
                "routed_experts",
                destination=f"{target}{destination}",
                expert=expert,
                rows=rows,
            )
    yield from _mlp_specs(f"{prefix}shared_experts.", config, config.shared_width, "shared_expert", f"{target}shared.")


def vision_specs(vision: VisionConfig, text_hidden: int) -> Iterator[TensorSpec]:
    """The tensors of the vision tower, the projector and the patch merger."""
    tower, width = "vision_tower.vision_model.", vision.hidden_size
    patch = (vision.num_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield TensorSpec(
        f"{tower}embeddings.patch_embedding.weight", (width, *patch), "vision_tower", destination="vision.patch_weight"
    )
    yield from _affine(f"{tower}pre_layrnorm", (width,), "vision_tower", "vision.pre_norm")
    for layer in range(vision.num_layers):
        prefix, target = f"{tower}encoder.layers.{layer}.", f"vision.layers.{layer}."
        for norm in ("layer_norm1", "layer_norm2"):
            yield from _affine(f"{prefix}{norm}", (width,), "vision_tower", f"{target}{norm}")
        for place, name in enumerate(("q_proj", "k_proj", "v_proj")):
            rows = (place * width, (place + 1) * width)
            yield from _affine(f"{prefix}self_attn.{name}", (width, width), "vision_tower", f"{target}packed", rows)
        yield from _affine(f"{prefix}self_attn.out_proj", (width, width), "vision_tower", f"{target}out")
        yield from _affine(f"{prefix}mlp.fc1", (vision.intermediate_size, width), "vision_tower", f"{target}up")
        yield from _affine(f"{prefix}mlp.fc2", (width, vision.intermediate_size), "vision_tower", f"{target}down")
    projected = vision.projector_hidden_size
    merged = text_hidden * vision.spatial_merge_size**2
    for name, target, inputs in (
        ("multi_modal_projector", "vision.projector", width),
        ("patch_merge_mlp", "vision.merger", merged),
    ):
        yield from _affine(f"{name}.linear_1", (projected, inputs), "projector", f"{target}.first")
        yield from _affine(f"{name}.linear_2", (text_hidden, projected), "projector", f"{target}.second")


def _affine(
    name: str, shape: tuple[int, ...], part: str, destination: str, rows: tuple[int, int] | None = None
) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", shape, part, destination=f"{destination}.weight", rows=rows)
    yield TensorSpec(f"{name}.bias", shape[:1], part, destination=f"{destination}.bias", rows=rows)
