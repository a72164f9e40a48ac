"""The safetensors files of a checkpoint: their headers, checked against the index, and their tensors, one by one.

Damage is named by file and tensor.
"""

import contextlib
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from target_model.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SIZES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1}


@dataclass(frozen=True)
class StoredTensor:
    """What a shard's header says of one tensor. `dtype` in safetensors' spelling."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Size of its data; 0 for a type that no tensor here may have."""
        return math.prod(self.shape) * _SIZES.get(self.dtype, 0)


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor that the shards of a checkpoint hold, checked against its index when there is one."""
    stored: dict[str, StoredTensor] = {}
    listed = read_index(directory)
    first_name: dict[str, str] = {}
    for name, file in (listed or {}).items():
        first_name.setdefault(file, name)
    for file in sorted(first_name) if listed is not None else [SINGLE]:
        path = directory / file
        with open_shard(path, first_name.get(file)) as shard:
            for name in shard.keys():
                if name in stored:
                    raise UserError(f"tensor {name} stands in both {stored[name].file} and {path}")
                view = shard.get_slice(name)
                stored[name] = StoredTensor(path, tuple(view.get_shape()), str(view.get_dtype()))
    for name, file in (listed or {}).items():
        if name not in stored or stored[name].file.name != file:
            raise UserError(f"tensor {name} is missing from {directory / file}, where {INDEX} places it")
    return stored


@contextlib.contextmanager
def open_shard(path: Path, expected: str | None = None) -> Iterator[safe_open]:
    """A safetensors file. Raises UserError when it is absent, truncated or not one.

    `expected` is a tensor that the index places there, for the message.
    """
    if not path.is_file():
        raise UserError(f"shard {path} is missing" + (f" (tensor {expected} and others)" if expected else ""))
    try:
        with safe_open(path, framework="pt") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is corrupt or truncated: {damage(path) or error}") from None


def read_index(directory: Path) -> dict[str, str] | None:
    """Tensor name -> file name, None without an index file."""
    document = _index_document(directory)
    return None if document is None else document["weight_map"]


def claimed_size(directory: Path) -> int | None:
    """`metadata.total_size` of the index. Published ones have been wrong: show it, never use it."""
    document = _index_document(directory) or {}
    size = (document.get("metadata") or {}).get("total_size")
    return int(size) if isinstance(size, int | float) else None


def damage(path: Path) -> str | None:
    """The first tensor of a file that does not lie inside it; None when the header cannot tell."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            return f"it has {size} bytes, not even a header"
        (length,) = struct.unpack("<Q", prefix)
        if length > size - 8:
            return f"its header should have {length} bytes, the file has {size}"
        try:
            header = json.loads(file.read(length))
            ends = {name: 8 + length + entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"}
        except (ValueError, KeyError, TypeError):
            return None
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        if end > size:
            return f"tensor {name} ends at byte {end}, the file has {size}"
    return None


def _index_document(directory: Path) -> dict[str, Any] | None:
    path = directory / INDEX
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        document["weight_map"] = {str(name): str(file) for name, file in document["weight_map"].items()}
        return document
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a safetensors index: {error!r}") from None
