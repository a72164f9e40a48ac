"""Loading a published checkpoint, strictly: every tensor of the table is there, in its shape and a fitting type, and
nothing else is.

Headers of all shards are checked before any weight is read; then tensors are streamed one by one into the parameters
that pack them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from target_model.config import M3Config
from target_model.errors import UserError
from target_model.load_progress import LoadProgress
from target_model.memory import check_memory
from target_model.model import TargetModel
from target_model.quantised import QuantisedWeight, common_formats
from target_model.quantised_formats import Format, Packed, dequantise
from target_model.resolve import resolve_target
from target_model.shards import StoredTensor, open_shard, read_headers
from target_model.stored_weights import StoredWeight, compare_tensors
from target_model.tensor_names import Region, TensorSpec


@dataclass(frozen=True)
class Wanted:
    """A stored weight, or a region of it (None: all), and where it goes."""

    weight: StoredWeight
    spec: TensorSpec
    region: Region | None = None


def load_target(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    language_only: bool = True,
) -> TargetModel:
    """The target behind a name or a directory, in `dtype` on `device`; quantised weights stay quantised.

    With `language_only` the vision tensors stay on disk. Without, the model gets its tower (`model.vision`) when the
    checkpoint holds one: text-only copies do not.

    Raises UserError naming the tensor and the file when anything is missing, unknown, mis-shaped, of a wrong type, or
    unreadable.
    """
    resolved = resolve_target(str(name_or_path))
    stored = read_headers(resolved.path)
    present = check_tensors(resolved.config, stored, resolved.path)
    wanted = [Wanted(weight, weight.spec) for weight in present if not (language_only and weight.spec.is_vision)]
    vision = any(each.spec.is_vision for each in wanted)
    formats = common_formats((each.spec.destination, each.weight.form) for each in wanted)
    check_memory(resolved.name, resolved.config, dtype, device, language_only=not vision, formats=formats)
    tensors = stream_weights(resolved.name, stored, wanted)
    return fill_model(resolved.config, tensors, dtype=dtype, device=device, vision=vision, formats=formats)


def fill_model(
    config: M3Config,
    tensors: Iterable[tuple[TensorSpec, Tensor | Packed]],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    vision: bool = False,
    formats: Mapping[str, Format] | None = None,
) -> TargetModel:
    """A model from published tensors, with the vision tower if `vision`; the parameters in `formats` stay quantised.

    The caller has checked that the tensors are complete (`check_tensors`).
    """
    model = TargetModel(config, dtype, vision=vision, formats=formats)
    model.materialise(device)
    fill_parameters(model, tensors)
    return model


def fill_parameters(model: TargetModel, tensors: Iterable[tuple[TensorSpec, Tensor | Packed]]) -> None:
    """Puts each tensor where its entry says."""
    parameters: dict[str, Tensor | QuantisedWeight] = dict(model.named_parameters())
    parameters |= {name: module for name, module in model.named_modules() if isinstance(module, QuantisedWeight)}
    for spec, tensor in tensors:
        place, index = parameters[spec.destination], _index(spec)
        if isinstance(place, QuantisedWeight):
            place.store(tensor, index)
            continue
        if isinstance(tensor, Packed):
            # Its parameter also packs a tensor of another format, so all of it is kept as plain numbers.
            tensor = dequantise(tensor.form, tensor.values, tensor.scale, tensor.tensor_scale)
        # A head norm fills one row for each head it serves.
        place[index].copy_(tensor.float() + 1 if spec.kind == "norm" else tensor)


def check_tensors(config: M3Config, stored: Mapping[str, StoredTensor], directory: Path) -> list[StoredWeight]:
    """What stores each tensor of the table. Raises UserError for the first tensor that is unknown, mis-shaped, of a
    wrong type, or missing.

    Vision tensors may be absent altogether (a text-only copy); those present must be the right ones.
    """
    check = compare_tensors(config, stored)
    if check.unknown:
        raise UserError(f"unknown tensor {check.unknown[0]} in {stored[check.unknown[0]].file}")
    if check.wrong:
        raise UserError(check.wrong[0])
    if check.missing:
        more = f" (and {len(check.missing) - 1} more)" if len(check.missing) > 1 else ""
        raise UserError(f"tensor {check.missing[0]}{more} is missing from the checkpoint in {directory}")
    return check.weights


def read_weight(
    weight: StoredWeight, stored: Mapping[str, StoredTensor], file: Path, shard: safe_open, region: Region | None = None
) -> Tensor | Packed:
    """The numbers of one weight whose values lie in the open shard `file`; its scales may lie in another.

    Of a `region` no other bytes are read; where the weight is quantised, its columns begin and end with a group.
    """

    def read(name: str, part: Region | None) -> Tensor:
        if stored[name].file == file:
            return _read(shard, name, part)
        with open_shard(stored[name].file) as other:
            return _read(other, name, part)

    form = weight.form
    if form is None:
        return read(weight.values, region)
    tensor_scale = None if weight.tensor_scale is None else read(weight.tensor_scale, None).reshape(())
    values = read(weight.values, _per_column(region, form.per_byte))
    if form.group:
        scale = read(weight.scale, _per_column(region, form.group))
    else:
        scale = read(weight.scale, None).float().reshape(-1, 1).expand(weight.spec.shape[0], 1)
        scale = scale if region is None else scale[slice(*region[0])]
    return Packed(form, values, scale, tensor_scale)


def _per_column(region: Region | None, numbers: int) -> Region | None:
    """The region of a weight in a tensor that holds so many of its numbers in a column."""
    if region is None:
        return None
    *rows, (first, end) = region
    return (*rows, (first // numbers, end // numbers))


def _read(shard: safe_open, name: str, region: Region | None) -> Tensor:
    return shard.get_tensor(name) if region is None else shard.get_slice(name)[tuple(slice(*part) for part in region)]


def by_file(stored: Mapping[str, StoredTensor], weights: Iterable[StoredWeight]) -> dict[Path, list[StoredWeight]]:
    """The weights grouped by the file of their values, files in order."""
    groups: dict[Path, list[StoredWeight]] = {}
    for weight in weights:
        groups.setdefault(stored[weight.values].file, []).append(weight)
    return dict(sorted(groups.items()))


def stream_weights(
    name: str | None, stored: Mapping[str, StoredTensor], wanted: Iterable[Wanted]
) -> Iterator[tuple[TensorSpec, Tensor | Packed]]:
    """Reads file by file, tensor by tensor; a large load shows how far it is, as that of `name` (None: it does not)."""
    places = {each.weight.values: each for each in wanted}
    with LoadProgress(name, sum(_bytes(each, stored) for each in places.values())) as progress:
        for file, weights in by_file(stored, [each.weight for each in places.values()]).items():
            with open_shard(file) as shard:
                for weight in weights:
                    each = places[weight.values]
                    yield each.spec, read_weight(weight, stored, file, shard, each.region)
                    progress.advance(_bytes(each, stored))


def _index(spec: TensorSpec) -> tuple[int | slice, ...]:
    """Where in its parameter a tensor goes."""
    expert = () if spec.expert is None else (spec.expert,)
    return (*expert, slice(None) if spec.rows is None else slice(*spec.rows))


def _bytes(wanted: Wanted, stored: Mapping[str, StoredTensor]) -> int:
    total = sum(stored[name].bytes for name in wanted.weight.names)
    if wanted.region is None:
        return total
    return total * math.prod(end - start for start, end in wanted.region) // math.prod(wanted.weight.spec.shape)
