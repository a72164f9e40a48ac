"""Loading one process's part of a target: it reads its own regions of the checkpoint and no other bytes.

Headers are checked as for a whole load: every tensor, on every rank.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from target_model.checkpoint import Wanted, check_tensors, fill_parameters, stream_weights
from target_model.config import M3Config
from target_model.errors import UserError
from target_model.memory import check_memory
from target_model.quantised import common_formats
from target_model.quantised_formats import Format
from target_model.resolve import resolve_target
from target_model.sharding import Shard, ShardedTarget, check_shard, part_bytes, shard_specs
from target_model.shards import read_headers
from target_model.stored_weights import StoredWeight
from target_model.tensor_names import Region


def load_shard(
    name_or_path: str | Path,
    shard: Shard,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    language_only: bool = True,
    build: Callable[..., ShardedTarget] = ShardedTarget,
) -> ShardedTarget:
    """This process's part of the target behind a name or a directory. `build` makes the model, as ShardedTarget does.

    Without `language_only` the stage that embeds also gets the whole vision tower, when the checkpoint holds one.

    Raises UserError where `load_target` does, and for a target that cannot be split so.
    """
    resolved = resolve_target(str(name_or_path))
    config = resolved.config
    check_shard(config, shard)
    stored = read_headers(resolved.path)
    present = {weight.spec.name: weight for weight in check_tensors(config, stored, resolved.path)}
    wanted = plan_reads(config, shard, present)
    if not language_only and shard.first == 0:
        wanted += [Wanted(weight, weight.spec) for weight in present.values() if weight.spec.is_vision]
    vision = any(each.spec.is_vision for each in wanted)
    formats = common_formats((each.spec.destination, each.weight.form) for each in wanted)
    part = part_bytes(config, shard, dtype.itemsize, language_only=not vision, formats=formats)
    check_memory(resolved.name, config, dtype, device, formats=formats, part=part)
    model = build(config, shard, dtype, vision=vision, formats=formats)
    model.materialise(device)
    # One of the ranks that load at the same time shows how far they are.
    fill_parameters(model, stream_weights(resolved.name if shard.rank == 0 else None, stored, wanted))
    return model


def plan_reads(config: M3Config, shard: Shard, present: dict[str, StoredWeight]) -> list[Wanted]:
    """The language model's tensors that this process reads. Raises UserError where a split would cut a group of columns
    with one scale.
    """
    wanted = []
    for published, own, region in shard_specs(config, shard):
        weight = present[published.name]
        if weight.form is not None:
            check_groups(published.name, weight.form, region, shard.size)
        wanted.append(Wanted(weight, own, region))
    return wanted


def check_groups(name: str, form: Format, region: Region | None, size: int) -> None:
    """Raises UserError unless the region's columns begin and end with a group of the format."""
    if region is not None and form.group and any(column % form.group for column in region[-1]):
        first, end = region[-1]
        raise UserError(
            f"the target cannot be split over {size} processes: the {end - first} columns that each would hold of "
            f"{name}, stored as {form.name}, are no multiple of {form.group}"
        )
