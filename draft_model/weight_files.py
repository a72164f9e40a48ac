"""Tensors of a draft directory, whichever files hold them; and the one file that is written."""

import os
import pickle
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from target_model.errors import UserError
from target_model.shards import INDEX, SINGLE, open_shard, read_headers

PICKLED = "pytorch_model.bin"


def read_weights(directory: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor under its stored name, and the metadata of the file (empty unless safetensors)."""
    if (directory / SINGLE).is_file() or (directory / INDEX).is_file():
        tensors: dict[str, Tensor] = {}
        metadata: dict[str, str] = {}
        for path in sorted({stored.file for stored in read_headers(directory).values()}):
            with open_shard(path) as shard:
                metadata |= shard.metadata() or {}
                tensors |= {name: shard.get_tensor(name) for name in shard.keys()}
        return tensors, metadata
    path = directory / PICKLED
    if not path.is_file():
        raise UserError(f"{directory} has neither {SINGLE} nor {PICKLED}")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{path} is damaged or holds more than tensors: {str(error).splitlines()[0]}") from None
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise UserError(f"{path} is not a dictionary of tensors")
    return loaded, {}


def stored_names(directory: Path) -> list[str]:
    """Names alone; a pickled file has to be read for them."""
    if (directory / SINGLE).is_file() or (directory / INDEX).is_file():
        return list(read_headers(directory))
    return list(read_weights(directory)[0])


def stored_metadata(directory: Path) -> dict[str, str]:
    """What the header of `model.safetensors` says, empty without one."""
    if not (directory / SINGLE).is_file():
        return {}
    with open_shard(directory / SINGLE) as shard:
        return shard.metadata() or {}


def write_weights(tensors: dict[str, Tensor], directory: str | os.PathLike, metadata: dict[str, str]) -> None:
    """`model.safetensors`, with `metadata` in its header."""
    whole: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        # Tensors that share memory cannot be saved as they are; copying all of them would double what is needed.
        storage = tensor.untyped_storage().data_ptr()
        whole[name] = (tensor.clone() if storage in seen else tensor).contiguous()
        seen.add(storage)
    save_file(whole, Path(directory) / SINGLE, metadata={"format": "pt", **metadata})
