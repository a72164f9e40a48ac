"""Writes a safetensors file tensor by tensor: the header comes first, so names, types and shapes are known ahead."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

TYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}


class ShardWriter:
    """A context manager. Tensors are written in the order of `entries`: name -> (type, shape)."""

    def __init__(self, path: Path, entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]):
        self._pending = list(entries.items())[::-1]
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        for name, (dtype, shape) in entries.items():
            end = offset + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": TYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        self.bytes = offset
        text = json.dumps(header, separators=(",", ":")).encode()
        # The data begins at a multiple of 8.
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """The next tensor."""
        expected, (dtype, shape) = self._pending.pop()
        if (name, tensor.dtype, tuple(tensor.shape)) != (expected, dtype, shape):
            raise ValueError(f"{name} {tensor.dtype} {tuple(tensor.shape)}, planned: {expected} {dtype} {shape}")
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._file.close()
        if kind is None and self._pending:
            raise ValueError(f"{self._pending[-1][0]} was planned and not written")
