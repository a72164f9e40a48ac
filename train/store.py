"""The offline feature store: what `spec capture` wrote, read back as the same `Features`.

A store is a directory with manifest.json and shards, features-NNNNN.safetensors. A shard holds whole training rows one
after the other, padding left out (T tokens, n rows, A width of the concatenated taps, H target hidden size):

    rows, lengths  int32 [n]     number of the row in the data set, tokens in it
    token_ids, documents, spans  int32 [T]
    aux [T, A], final_state [T, H]  in the store's dtype
    aux_scale fp32 [T, taps], final_scale fp32 [T, 1]  fp8 only: value = stored * scale, one for each tap of a token

The final state stands in for logits: the frozen head is applied again, at 1/33 of their size for MiniMax-M3.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draft_model.config import read_json
from target_model.errors import UserError
from target_model.resolve import ResolvedTarget
from target_model.tokenizer import Tokenizer
from train.config import DataConfig
from train.data import TrainingRows, valid_steps
from train.features import Features, pad_rows, row_features

MANIFEST, FORMAT = "manifest.json", 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
LAYOUT = ("rows", "lengths", "token_ids", "documents", "spans")
_FP8_LARGEST = 448.0
# Files up to 64 pieces are hashed whole, of larger ones so many pieces spread over them: a terabyte takes minutes.
_PIECE, _PIECES = 1 << 20, 64


def shard_name(number: int) -> str:
    return f"features-{number:05d}.safetensors"


def fingerprint(paths: Sequence[Path]) -> str:
    """SHA-256 over names, sizes and contents of files."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        offsets = (
            range(0, size, _PIECE)
            if size <= _PIECE * _PIECES
            else np.linspace(0, size - _PIECE, _PIECES).astype(int).tolist()
        )
        with open(path, "rb") as file:
            for offset in offsets:
                file.seek(offset)
                digest.update(file.read(_PIECE))
    return digest.hexdigest()


def identity(target: ResolvedTarget, tokenizer: Tokenizer, taps: Sequence[int], data: DataConfig) -> dict[str, Any]:
    """What features depend on: a store and the run that trains from it must agree in every field."""
    weights = [*sorted(target.path.glob("*.safetensors")), target.path / "config.json"]
    return {
        "format": FORMAT,
        "target": {
            "name": target.name,
            "checkpoint": fingerprint(weights),
            "tokenizer": fingerprint([target.path / "tokenizer.json"]),
            "template": hashlib.sha256(tokenizer.template.encode()).hexdigest(),
        },
        "taps": list(taps),
        "tap_convention": "residual stream entering the layer",
        "norm_convention": "final state behind the final norm",
        # What was not set then and now has its default.
        "data": data.model_dump(),
    }


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def check_same(directory: Path, manifest: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuses a store that differs from what is wanted; the message names the field."""
    stored = flatten(manifest)
    for key, value in flatten(wanted).items():
        # The name is for people: a copy of a checkpoint elsewhere is the same target.
        if key != "target.name" and stored.get(key) != value:
            raise UserError(f"feature store {directory} has {key}={stored.get(key)!r}, but this run needs {value!r}")


def quantise(values: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """(e4m3 [T, C], scale fp32 [T, groups]): the largest number of each of the groups of a row becomes e4m3's."""
    parts = values.float().unflatten(-1, (groups, -1))
    scale = (parts.abs().amax(-1, keepdim=True) / _FP8_LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (parts / scale).to(torch.float8_e4m3fn).flatten(-2), scale[..., 0]


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    """The numbers behind `quantise`, in fp32."""
    return (values.float().unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)


def manifest_hash(manifest: dict[str, Any]) -> str:
    """What every shard carries, so that shards of two captures cannot be mixed."""
    core = {key: value for key, value in manifest.items() if key not in ("complete", "refused")}
    return hashlib.sha256(json.dumps(core, sort_keys=True).encode()).hexdigest()


class FeatureStore:
    """A finished store. Its rows are known at once; taps and states are read when a batch asks for them."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        if not (self.directory / MANIFEST).is_file():
            raise UserError(f"feature store {directory} does not exist: it has no {MANIFEST}")
        self.manifest = read_json(self.directory / MANIFEST)
        if self.manifest.get("format") != FORMAT:
            raise UserError(f"feature store {directory} has format {self.manifest.get('format')!r}, known is {FORMAT}")
        if not self.manifest["complete"]:
            raise UserError(f"feature store {directory} is not complete: the same `spec capture` finishes it")
        self._shards = [self._open(number) for number in range(self.manifest["shards"])]
        # (shard, first token in it, tokens) of every row.
        self._places: list[tuple[int, int, int]] = []
        self.rows = self._read_rows()
        self._lengths = (self.rows.documents > 0).sum(-1)

    def prepare(self, wanted: dict[str, Any], steps: int, device: torch.device, dtype: torch.dtype) -> None:
        """Checks that the store is what a run needs; `features` then answers in `dtype` on `device`."""
        check_same(self.directory, self.manifest, wanted)
        self.device, self.dtype = device, dtype
        self.valid_steps = valid_steps(self.rows.documents, self.rows.spans, steps)

    def features(self, indices: np.ndarray) -> Features:
        """The rows `indices`, cut to the longest of them."""
        width = int(self._lengths[indices].max())
        states = [self._states(int(row)) for row in indices]
        aux, final = (pad_rows([entry[part] for entry in states], width).to(self.device) for part in (0, 1))
        return replace(row_features(self.rows, self.valid_steps, indices, self.device), aux=aux, final_state=final)

    def micro_batches(self, parts: list[list[np.ndarray]], rank: int) -> list[Features]:
        """The micro batches of `rank`, of the rows `parts` [ranks][micro batches] of an optimizer step."""
        return [self.features(rows) for rows in parts[rank]]

    def _states(self, row: int) -> tuple[Tensor, Tensor]:
        shard, start, length = self._places[row]
        file, piece = self._shards[shard], slice(start, start + length)
        try:
            aux, final = file.get_slice("aux")[piece], file.get_slice("final_state")[piece]
            if self.manifest["dtype"] == "fp8":
                aux = dequantise(aux, file.get_slice("aux_scale")[piece])
                final = dequantise(final, file.get_slice("final_scale")[piece])
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.directory / shard_name(shard)} cannot be read: {error}") from None
        return aux.to(self.dtype), final.to(self.dtype)

    def _open(self, number: int) -> Any:
        path = self.directory / shard_name(number)
        try:
            file = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is missing or damaged: {error}") from None
        if (file.metadata() or {}).get("manifest") != manifest_hash(self.manifest):
            raise UserError(f"{path} belongs to another capture than {self.directory / MANIFEST}")
        return file

    def _read_rows(self) -> TrainingRows:
        width = self.manifest["data"]["sequence_length"]
        laid_out = []
        for shard, file in enumerate(self._shards):
            rows, lengths, *flat = (file.get_tensor(name).numpy() for name in LAYOUT)
            if len(rows) != len(lengths) or any(len(values) != lengths.sum() for values in flat):
                raise UserError(f"{self.directory / shard_name(shard)}: lengths and token ids disagree")
            starts = np.cumsum(lengths) - lengths
            self._places += [(shard, int(s), int(n)) for s, n in zip(starts, lengths, strict=True)]
            inside = np.arange(width) < lengths[:, None]
            padded = np.zeros((3, len(rows), width), np.int32)
            for part, values in zip(padded, flat, strict=True):
                part[inside] = values
            laid_out.append(padded)
        token_ids, documents, spans = np.concatenate(laid_out, axis=1)
        dropped = Counter(self.manifest["dropped"])
        if self.manifest["refused"]:
            dropped["rows whose features were not finite"] += self.manifest["refused"]
        return TrainingRows(token_ids, documents, spans, dropped, Counter(self.manifest["documents_read"]))
