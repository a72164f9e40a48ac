"""Loading a published checkpoint, strictly: every tensor of the table is there, in its shape and a fitting type, and
nothing else is.

Headers of all shards are checked before any weight is read; then tensors are streamed one by one into the parameters
that pack them.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from target_model.config import M3Config
from target_model.errors import UserError
from target_model.memory import check_memory
from target_model.model import TargetModel
from target_model.resolve import resolve_target
from target_model.tensor_names import TensorSpec, tensor_specs

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_WEIGHT_TYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class StoredTensor:
    """What a shard's header says of one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load_target(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    language_only: bool = True,
) -> TargetModel:
    """The target behind a name or a directory, in `dtype` on `device`.

    With `language_only` the vision tensors stay on disk. Without, the model gets its tower (`model.vision`) when the
    checkpoint holds one: text-only copies do not.

    Raises UserError naming the tensor and the file when anything is missing, unknown, mis-shaped, of a wrong type, or
    unreadable.
    """
    resolved = resolve_target(str(name_or_path))
    stored = read_headers(resolved.path)
    present = check_tensors(resolved.config, stored, resolved.path)
    wanted = [spec for spec in present if not (language_only and spec.is_vision)]
    vision = any(spec.is_vision for spec in wanted)
    check_memory(resolved.name, resolved.config, dtype, device, language_only=not vision)
    return fill_model(resolved.config, _stream(stored, wanted), dtype=dtype, device=device, vision=vision)


def fill_model(
    config: M3Config,
    tensors: Iterable[tuple[TensorSpec, Tensor]],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    vision: bool = False,
) -> TargetModel:
    """A model from published tensors, with the vision tower if `vision`.

    The caller has checked that the tensors are complete (`check_tensors`).
    """
    model = TargetModel(config, dtype, vision=vision)
    model.materialise(device)
    parameters = dict(model.named_parameters())
    for spec, tensor in tensors:
        place = parameters[spec.destination]
        if spec.expert is not None:
            place = place[spec.expert]
        if spec.rows is not None:
            place = place[slice(*spec.rows)]
        # A head norm fills one row for each head it serves.
        place.copy_(tensor.float() + 1 if spec.kind == "norm" else tensor)
    return model


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor that the shards of a checkpoint hold, checked against its index when there is one."""
    stored: dict[str, StoredTensor] = {}
    listed = _read_index(directory)
    files = sorted(set(listed.values())) if listed is not None else [SINGLE]
    for file in files:
        path = directory / file
        with open_shard(path) as shard:
            for name in shard.keys():
                if name in stored:
                    raise UserError(f"tensor {name} stands in both {stored[name].file} and {path}")
                view = shard.get_slice(name)
                stored[name] = StoredTensor(path, tuple(view.get_shape()), view.get_dtype())
    for name, file in (listed or {}).items():
        if name not in stored or stored[name].file.name != file:
            raise UserError(f"tensor {name} is missing from {directory / file}, where {INDEX} places it")
    return stored


def check_tensors(config: M3Config, stored: Mapping[str, StoredTensor], directory: Path) -> list[TensorSpec]:
    """The tensors of the table that are there. Raises UserError for the first tensor that is missing, unknown,
    mis-shaped or of a wrong type.

    Vision tensors may be absent altogether (a text-only copy); those present must be the right ones.
    """
    specs = {spec.name: spec for spec in tensor_specs(config)}
    for name, tensor in stored.items():
        if _is_multi_token_prediction(name):
            continue
        if name not in specs:
            raise UserError(f"unknown tensor {name} in {tensor.file}")
        _check_tensor(specs[name], tensor)
    has_vision = any(spec.is_vision and spec.name in stored for spec in specs.values())
    specs = {name: spec for name, spec in specs.items() if has_vision or not spec.is_vision}
    missing = [name for name in specs if name not in stored]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(f"tensor {missing[0]}{more} is missing from the checkpoint in {directory}")
    return list(specs.values())


@contextlib.contextmanager
def open_shard(path: Path) -> Iterator[safe_open]:
    """A safetensors file. Raises UserError when it is absent, truncated or not one."""
    if not path.is_file():
        raise UserError(f"shard {path} is missing")
    try:
        with safe_open(path, framework="pt") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is corrupt or truncated: {error}") from None


def _stream(stored: Mapping[str, StoredTensor], wanted: list[TensorSpec]) -> Iterator[tuple[TensorSpec, Tensor]]:
    by_file: dict[Path, list[TensorSpec]] = {}
    for spec in wanted:
        by_file.setdefault(stored[spec.name].file, []).append(spec)
    for file, specs in sorted(by_file.items()):
        with open_shard(file) as shard:
            for spec in specs:
                yield spec, shard.get_tensor(spec.name)


def _check_tensor(spec: TensorSpec, tensor: StoredTensor) -> None:
    if tensor.shape != spec.shape:
        raise UserError(
            f"tensor {spec.name} in {tensor.file} has shape {list(tensor.shape)}, "
            f"the config asks for {list(spec.shape)}"
        )
    allowed = ("F32",) if spec.kind == "fp32" else _WEIGHT_TYPES
    if tensor.dtype not in allowed:
        raise UserError(f"tensor {spec.name} in {tensor.file} is {tensor.dtype}, it must be {' or '.join(allowed)}")


def _is_multi_token_prediction(name: str) -> bool:
    """MTP weights, which no published checkpoint holds though its config announces them: left on disk."""
    return name.startswith("mtp.") or ".mtp." in name


def _read_index(directory: Path) -> dict[str, str] | None:
    path = directory / INDEX
    if not path.exists():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a safetensors index: {error!r}") from None
