"""Loading a published checkpoint, strictly: every tensor of the table is there, in its shape and a fitting type, and
nothing else is.

Headers of all shards are checked before any weight is read; then tensors are streamed one by one into the parameters
that pack them.
"""

from collections.abc import Iterable, Iterator, Mapping
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
from target_model.tensor_names import TensorSpec


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
    wanted = [weight for weight in present if not (language_only and weight.spec.is_vision)]
    vision = any(weight.spec.is_vision for weight in wanted)
    formats = common_formats((weight.spec.destination, weight.form) for weight in wanted)
    check_memory(resolved.name, resolved.config, dtype, device, language_only=not vision, formats=formats)
    with LoadProgress(resolved.name, sum(_bytes(weight, stored) for weight in wanted)) as progress:
        tensors = _stream(stored, wanted, progress)
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
    parameters: dict[str, Tensor | QuantisedWeight] = dict(model.named_parameters())
    parameters |= {name: model.get_submodule(name) for name in formats or {}}
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
    return model


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
    weight: StoredWeight, stored: Mapping[str, StoredTensor], file: Path, shard: safe_open
) -> Tensor | Packed:
    """The numbers of one weight whose values lie in the open shard `file`; its scales may lie in another."""

    def read(name: str) -> Tensor:
        if stored[name].file == file:
            return shard.get_tensor(name)
        with open_shard(stored[name].file) as other:
            return other.get_tensor(name)

    if weight.form is None:
        return read(weight.values)
    tensor_scale = None if weight.tensor_scale is None else read(weight.tensor_scale).reshape(())
    return Packed(weight.form, read(weight.values), read(weight.scale), tensor_scale)


def by_file(stored: Mapping[str, StoredTensor], weights: Iterable[StoredWeight]) -> dict[Path, list[StoredWeight]]:
    """The weights grouped by the file of their values, files in order."""
    groups: dict[Path, list[StoredWeight]] = {}
    for weight in weights:
        groups.setdefault(stored[weight.values].file, []).append(weight)
    return dict(sorted(groups.items()))


def _stream(
    stored: Mapping[str, StoredTensor], wanted: list[StoredWeight], progress: LoadProgress
) -> Iterator[tuple[TensorSpec, Tensor | Packed]]:
    for file, weights in by_file(stored, wanted).items():
        with open_shard(file) as shard:
            for weight in weights:
                yield weight.spec, read_weight(weight, stored, file, shard)
                progress.advance(_bytes(weight, stored))


def _index(spec: TensorSpec) -> tuple[int | slice, ...]:
    """Where in its parameter a tensor goes."""
    expert = () if spec.expert is None else (spec.expert,)
    return (*expert, slice(None) if spec.rows is None else slice(*spec.rows))


def _bytes(weight: StoredWeight, stored: Mapping[str, StoredTensor]) -> int:
    return sum(stored[name].bytes for name in weight.names)
