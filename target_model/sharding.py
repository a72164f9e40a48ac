"""A target split over processes: every layer over the ranks of a group, and the layers themselves into stages.

Attention is split by heads: query heads evenly, KV and index heads up to their number and repeated above it, so a
rank's cache holds its own heads only. Dense MLP and shared expert are split by inner width (first product by rows,
second by columns), routed experts are held whole, E / size on each rank, and the router by all. What attention and MLP
put out is then a partial sum: one all-reduce behind each of them, before anything is added, normalised or tapped. The
embedding is repeated (a look-up reads single rows; splitting M3's would cost an all-reduce to save 2 GB on a GPU), the
output head is split by vocabulary (read whole, it could be the largest read of a step) and its scores are gathered.

The split model is an ordinary `TargetModel` of a smaller config. Shapes: T rows, H hidden, V vocabulary, N experts of a
token.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from target_model.batch import Batch
from target_model.cache import PagedCache, TransientCache
from target_model.config import M3Config
from target_model.errors import UserError
from target_model.kernels import ops
from target_model.layers import empty
from target_model.model import Recorder, TargetModel, TargetOutput
from target_model.moe import MixtureOfExperts
from target_model.quantised import quantise_parameters
from target_model.quantised_formats import Format
from target_model.sizes import weight_bytes
from target_model.tensor_names import Region, TensorSpec, text_specs


@dataclass(frozen=True)
class Shard:
    """What one process holds: part `rank` of `size` of each layer from `first` up to `end` (None: the last)."""

    rank: int = 0
    size: int = 1
    first: int = 0
    end: int | None = None

    def layers(self, config: M3Config) -> range:
        """The layers it holds."""
        return range(self.first, config.num_layers if self.end is None else self.end)


def check_shard(config: M3Config, shard: Shard) -> None:
    """Raises UserError unless the target can be split so."""
    size = shard.size
    if not 0 <= shard.rank < size:
        raise UserError(f"rank {shard.rank} is none of {size} processes")
    layers = shard.layers(config)
    if not 0 <= layers.start < layers.stop <= config.num_layers:
        raise UserError(
            f"layers {layers.start} to {layers.stop} are no stage of a target of {config.num_layers} layers"
        )
    counts = {
        "query heads": config.num_heads,
        "entries of the vocabulary": config.vocab_size,
        "columns of the dense MLP": 0 if all(config.moe_layers) else config.dense_width,
        "experts": config.num_experts if any(config.moe_layers) else 0,
        "columns of the shared expert": config.shared_width if any(config.moe_layers) else 0,
    }
    for name, count in counts.items():
        if count % size:
            raise UserError(f"the target cannot be split over {size} processes: its {count} {name} do not divide")
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise UserError(
            f"the target cannot be split over {size} processes: its {config.num_kv_heads} KV heads neither divide nor "
            "repeat evenly"
        )


def local_config(config: M3Config, shard: Shard) -> M3Config:
    """The config of what a process holds; its vocabulary stays whole.

    Reuse of block choices counts sparse layers from the first of the whole target: see ShardedTarget.
    """
    check_shard(config, shard)
    layers, size = shard.layers(config), shard.size
    kv_heads, experts = max(1, config.num_kv_heads // size), config.num_experts // size
    return replace(
        config,
        num_layers=len(layers),
        sparse_layers=config.sparse_layers[layers.start : layers.stop],
        moe_layers=config.moe_layers[layers.start : layers.stop],
        num_heads=config.num_heads // size,
        num_kv_heads=kv_heads,
        num_index_heads=kv_heads,
        dense_width=config.dense_width // size,
        shared_width=config.shared_width // size,
        num_experts=experts,
        experts_per_token=min(config.experts_per_token, experts),
        use_index_cache=False,
    )


def shard_specs(config: M3Config, shard: Shard) -> Iterator[tuple[TensorSpec, TensorSpec, Region | None]]:
    """Every tensor of the language model that a process reads: as published, as its own model takes it, and which
    region of it (None: all).
    """
    local = local_config(config, shard)
    own_experts = range(shard.rank * local.num_experts, (shard.rank + 1) * local.num_experts)
    layers = shard.layers(config)

    def has_end(spec: TensorSpec) -> bool:
        if spec.part == "embed_tokens":
            return layers.start == 0
        return spec.part != "lm_head" or layers.stop == config.num_layers

    published = (
        spec
        for spec in text_specs(config)
        if has_end(spec)
        and (spec.layer is None or spec.layer in layers)
        and (spec.expert is None or spec.expert in own_experts)
    )
    for whole, own in zip(published, filter(has_end, text_specs(local)), strict=True):
        if whole.part == "router":
            yield whole, replace(own, shape=whole.shape), None
            continue
        if whole.part == "lm_head":
            own = replace(own, shape=(whole.shape[0] // shard.size, whole.shape[1]))
        region = tuple(_part(extent, kept, shard) for extent, kept in zip(whole.shape, own.shape, strict=True))
        yield whole, own, None if whole.shape == own.shape else region


def _part(extent: int, kept: int, shard: Shard) -> tuple[int, int]:
    """Where a rank's `kept` of `extent` begin and end. Fewer parts than ranks: neighbours hold the same one."""
    start = shard.rank * (extent // kept) // shard.size * kept
    return start, start + kept


def part_bytes(
    config: M3Config,
    shard: Shard,
    element_size: int,
    *,
    language_only: bool = True,
    formats: Mapping[str, Format] | None = None,
) -> int:
    """Bytes of what a process holds, as `weight_bytes` counts them; `formats` names parameters of the part."""
    local, layers = local_config(config, shard), shard.layers(config)
    total = weight_bytes(local, element_size, language_only=language_only, formats=formats)
    # The local config has the router of its own experts only, and both ends whole.
    elsewhere = config.num_experts - local.num_experts
    total += sum(local.moe_layers) * elsewhere * (config.hidden_size + 1) * 4
    end = config.vocab_size * config.hidden_size * element_size
    total -= end - (end // shard.size if layers.stop == config.num_layers else 0)
    return total - (end if layers.start else 0)


class ShardedExperts(MixtureOfExperts):
    """Some of a layer's experts, whole, with the router of all of them; its output is a partial sum."""

    def __init__(self, config: M3Config, shard: Shard, dtype: torch.dtype):
        super().__init__(local_config(config, shard), dtype)
        self.routing = (config.experts_per_token, config.routed_scaling_factor)
        self.gate = empty(config.num_experts, config.hidden_size, dtype=torch.float32)
        self.gate_bias = empty(config.num_experts, dtype=torch.float32)
        self.held = config.num_experts // shard.size
        self.first_expert = shard.rank * self.held

    def forward(self, x_TH: Tensor) -> Tensor:
        weights_TN, experts_TN = ops.route(x_TH, self.gate, self.gate_bias, *self.routing)
        own_TN = experts_TN - self.first_expert
        elsewhere_TN = (own_TN < 0) | (own_TN >= self.held)
        routed = ops.grouped_experts(
            x_TH,
            self.w13,
            self.w2,
            weights_TN.masked_fill(elsewhere_TN, 0.0),
            own_TN.masked_fill(elsewhere_TN, self.held),
            *self.activation,
            routed_over=self.gate.shape[0],
        )
        return routed + self.shared(x_TH)


class ShardedTarget(TargetModel):
    """One process's part of a target. All ranks of `group` (None: all processes) call the same methods, in the same
    order and on the same batches, and get the same states and scores. Recorded block choices are those of a rank's own
    heads, but where only one layer's are asked for they are everybody's.

    `config` describes the part; `whole` is the target's. `formats` names parameters of the part.
    """

    def __init__(
        self,
        config: M3Config,
        shard: Shard,
        dtype: torch.dtype = torch.float32,
        *,
        vision: bool = False,
        formats: Mapping[str, Format] | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        local = local_config(config, shard)
        super().__init__(local, dtype, vision=vision)
        self.whole, self.shard, self.group = config, shard, group
        self.first_layer = shard.first
        with torch.device("meta"):
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size // shard.size, bias=False, dtype=dtype)
            for number, layer in zip(shard.layers(config), self.layers, strict=True):
                layer.attention.reuses_blocks = config.reuses_blocks[number]
                if config.moe_layers[number]:
                    layer.mlp = ShardedExperts(config, shard, dtype)
        quantise_parameters(self, formats or {})
        self.requires_grad_(False)
        self.eval()
        if shard.size > 1:
            for layer in self.layers:
                layer.attention.register_forward_hook(self._add_up)
                layer.mlp.register_forward_hook(self._add_up)

    def _add_up(self, module: nn.Module, inputs: tuple, output: Tensor | tuple[Tensor, Tensor | None]) -> None:
        """Completes the partial sums in place, before anybody reads them."""
        dist.all_reduce(output[0] if isinstance(output, tuple) else output, group=self.group)

    @torch.no_grad()
    def forward(
        self,
        batch: Batch,
        cache: PagedCache | TransientCache,
        taps: Sequence[int] = (),
        recorder: Recorder | None = None,
    ) -> TargetOutput:
        output = super().forward(batch, cache, taps, recorder)
        if recorder is not None and not recorder.complete and self.shard.size > 1:
            own_TJN = recorder.blocks[recorder.choice_of]
            if own_TJN is not None:
                gathered = own_TJN.new_empty(self.shard.size, *own_TJN.shape)
                dist.all_gather(list(gathered), own_TJN.contiguous(), group=self.group)
                # Above one KV head on each rank, neighbours hold the same one.
                every = max(1, self.shard.size // self.whole.num_kv_heads)
                recorder.blocks[recorder.choice_of] = torch.cat(list(gathered[::every]), dim=1)
        return output

    @torch.no_grad()
    def scores(self, final_state: Tensor) -> Tensor:
        own = self.lm_head(final_state)
        if self.shard.size == 1:
            return own
        gathered = own.new_empty(self.shard.size, *own.shape)
        dist.all_gather(list(gathered), own.contiguous(), group=self.group)
        return gathered.movedim(0, -2).flatten(-2)
