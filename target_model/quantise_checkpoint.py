"""`spec quantize`: a plain checkpoint in one of the published quantised layouts, made tensor by tensor.

Shards keep their names and their tensors; a quantised weight takes its place together with its scales.
"""

import fnmatch
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from target_model.checkpoint import by_file, check_tensors
from target_model.config import M3Config
from target_model.errors import UserError, atomic_directory
from target_model.format_coverage import checkpoint_bytes, covered_format
from target_model.quantised_config import quantisation_json
from target_model.quantised_formats import MXFP4, MXFP8, NVFP4, Format, Packed, quantise, tensor_scale_of
from target_model.resolve import ResolvedTarget, resolve_target
from target_model.shard_writer import TYPE_NAMES, ShardWriter
from target_model.shards import INDEX, StoredTensor, open_shard, read_headers
from target_model.sizes import bytes_text
from target_model.stored_weights import StoredWeight, module_of

_DTYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}
_FORMATS = {"mxfp8": MXFP8, "mxfp4": MXFP4, "nvfp4": NVFP4}
_SCALE_NAMES = {MXFP8: "weight_scale_inv", MXFP4: "weight_scale", NVFP4: "weight_scale"}
# Engines that quantise activations too read it as their static scale; no activation was measured here.
_INPUT_SCALE = 1.0
Entries = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Written:
    """What was made: bytes of all shards, and how many weights are in each format."""

    bytes: int
    weights: dict[str, int]


def quantise_checkpoint(
    source: str,
    destination: Path,
    format_name: str,
    *,
    exclude: tuple[str, ...] = (),
    device: torch.device | str = "cpu",
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Written:
    """Writes the target `source` in a format to the new directory `destination`.

    `exclude` are globs of modules to leave in bf16 beside those that the format leaves anyway. The arithmetic runs on
    `device`. `advance` hears of every weight that is done. Raises UserError for a source that is quantised already, a
    destination that exists, a glob that matches nothing, or a full disk.
    """
    if format_name not in _FORMATS:
        raise UserError(f"format {format_name!r} is none to quantise to: expected one of {', '.join(_FORMATS)}")
    resolved = resolve_target(source)
    if resolved.config.quantisation is not None:
        raise UserError(f"{source} is quantised already ({resolved.config.quantisation.method})")
    if destination.exists():
        raise UserError(f"{destination} exists already")
    _check_disk(resolved.config, format_name, destination)
    stored = read_headers(resolved.path)
    weights = check_tensors(resolved.config, stored, resolved.path)
    modules = [module_of(weight.spec) for weight in weights]
    for pattern in exclude:
        if not fnmatch.filter(modules, pattern):
            raise UserError(f"exclude {pattern!r} matches no module of {source}")
    formats = {weight.spec.name: _chosen_format(weight, format_name, exclude) for weight in weights}
    largest = _largest(stored, weights, formats) if format_name == "nvfp4" else {}
    with atomic_directory(destination) as work:
        weight_map: dict[str, str] = {}
        size = done = 0
        for file, group in by_file(stored, weights).items():
            entries: Entries = {}
            for weight in group:
                entries |= _entries(weight, formats[weight.spec.name], stored)
            with open_shard(file) as shard, ShardWriter(work / file.name, entries) as writer:
                size += writer.bytes
                for weight in group:
                    form = formats[weight.spec.name]
                    tensors = _convert(weight, form, shard.get_tensor(weight.values), largest, device)
                    for name, tensor in tensors.items():
                        writer.write(name, tensor)
                    done += 1
                    advance(done, len(weights))
            weight_map |= dict.fromkeys(entries, file.name)
        _copy_other_files(resolved.path, work, {file.name for file in by_file(stored, weights)})
        _write_json(work / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
        _write_config(resolved, work, format_name, formats)
    return Written(size, dict(Counter(form.name if form else "plain" for form in formats.values())))


def _chosen_format(weight: StoredWeight, format_name: str, exclude: tuple[str, ...]) -> Format | None:
    if any(fnmatch.fnmatchcase(module_of(weight.spec), pattern) for pattern in exclude):
        return None
    return covered_format(weight.spec, format_name)


def _entries(weight: StoredWeight, form: Format | None, stored: Mapping[str, StoredTensor]) -> Entries:
    shape, module = weight.spec.shape, module_of(weight.spec)
    if form is None:
        return {weight.spec.name: (_DTYPES[stored[weight.values].dtype], shape)}
    entries: Entries = {
        weight.spec.name: (form.values_dtype, form.values_shape(shape)),
        f"{module}.{_SCALE_NAMES[form]}": (form.scale_dtype, form.scale_shape(shape)),
    }
    if form.tensor_scale:
        entries |= dict.fromkeys((f"{module}.weight_scale_2", f"{module}.input_scale"), (torch.float32, ()))
    return entries


def _convert(
    weight: StoredWeight,
    form: Format | None,
    tensor: Tensor,
    largest: Mapping[str, Tensor],
    device: torch.device | str,
) -> dict[str, Tensor]:
    """The tensors that store a weight, in the order of `_entries`."""
    if form is None:
        return {weight.spec.name: tensor}
    module = module_of(weight.spec)
    tensor_scale = tensor_scale_of(form, largest[_shared(weight)]).to(device) if form.tensor_scale else None
    packed: Packed = quantise(form, tensor.to(device), tensor_scale)
    tensors = {weight.spec.name: packed.values.cpu(), f"{module}.{_SCALE_NAMES[form]}": packed.scale.cpu()}
    if form.tensor_scale:
        tensors[f"{module}.weight_scale_2"] = packed.tensor_scale.cpu()
        tensors[f"{module}.input_scale"] = torch.tensor(_INPUT_SCALE)
    return tensors


def _largest(
    stored: Mapping[str, StoredTensor], weights: list[StoredWeight], formats: Mapping[str, Format | None]
) -> dict[str, Tensor]:
    """Largest magnitudes of the weights that get a scale of the whole tensor: a first pass over the files."""
    found: dict[str, Tensor] = {}
    scaled = [weight for weight in weights if (form := formats[weight.spec.name]) is not None and form.tensor_scale]
    for file, group in by_file(stored, scaled).items():
        with open_shard(file) as shard:
            for weight in group:
                largest, key = shard.get_tensor(weight.values).abs().amax().float(), _shared(weight)
                found[key] = torch.maximum(found[key], largest) if key in found else largest
    return found


def _shared(weight: StoredWeight) -> str:
    """Gate and up of an expert share one scale, since engines multiply with both at once."""
    module = module_of(weight.spec)
    return module.removesuffix(".w3") + ".w1" if module.endswith(".w3") else module


def _write_config(source: ResolvedTarget, work: Path, format_name: str, formats: Mapping[str, Format | None]) -> None:
    document = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
    document["_name_or_path"] = source.name  # whose drafts fit
    modules = {name.removesuffix(".weight"): form for name, form in formats.items()}
    quantised = {module: form for module, form in modules.items() if form is not None}
    plain = [name for name, form in formats.items() if form is None and name.endswith(".weight") and "norm" not in name]
    excluded = [name.removesuffix(".weight") for name in plain]
    document["quantization_config"] = quantisation_json(_FORMATS[format_name], quantised, excluded)
    _write_json(work / "config.json", document)


def _copy_other_files(source: Path, work: Path, shards: set[str]) -> None:
    """Tokenizer, template, licences; config and index are written anew."""
    for path in source.iterdir():
        if path.is_file() and path.name not in (*shards, "config.json", INDEX) and not path.name.startswith("."):
            shutil.copyfile(path, work / path.name)


def _write_json(path: Path, document: dict) -> None:
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")


def _check_disk(config: M3Config, format_name: str, destination: Path) -> None:
    existing = next(path for path in destination.resolve().parents if path.exists())
    free, needed = shutil.disk_usage(existing).free, checkpoint_bytes(config, format_name)
    if free < needed:
        raise UserError(
            f"{destination} needs {bytes_text(needed)}, but the disk of {existing} has {bytes_text(free)} free"
        )
