"""Writes an offline feature store: the frozen target runs once over the data, by shards, and may be interrupted."""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from draft_model.config import read_json
from target_model.checkpoint import load_target
from target_model.errors import UserError, atomic_write, write_json
from target_model.resolve import resolve_target
from target_model.tokenizer import load_tokenizer
from train.config import TrainConfig
from train.data import TrainingRows, load_rows
from train.engine import resolve_device
from train.features import Features, OnlineCapture
from train.initialise import run_draft_config
from train.store import DTYPES, LAYOUT, MANIFEST, check_same, identity, manifest_hash, quantise, shard_name

_SHARD_BYTES = 1 << 28
# A capture with more bad rows than this share of all is a fault of the target or its numbers, not of a few rows.
_REFUSED_SHARE = 0.01


@dataclass(frozen=True)
class CaptureResult:
    """Rows in the store, rows refused because a feature was not finite, bytes on disk."""

    directory: Path
    rows: int
    refused: int
    size: int


def bytes_per_token(hidden_size: int, taps: int, dtype: str) -> int:
    """Taps and final state, with the scales of fp8, and three 32-bit numbers of the layout."""
    scales = 4 * (taps + 1) if dtype == "fp8" else 0
    return (taps + 1) * hidden_size * DTYPES[dtype].itemsize + scales + 12


def capture_store(
    config: TrainConfig,
    directory: str | Path,
    *,
    dtype: str = "bf16",
    shard_rows: int | None = None,
    plan_only: bool = False,
    note: Callable[[str], None] = print,
) -> CaptureResult | None:
    """Fills `directory` with the features of a training configuration, or goes on where an interrupted capture stopped.

    Finished shards are kept; a shard appears whole or not at all. `note` gets lines for people. With `plan_only` only
    the size is worked out. Raises UserError for a directory that holds other features (naming the field), too little
    disk, or too many rows whose features are not finite.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    directory = Path(directory)
    target = resolve_target(config.target)
    tokenizer = load_tokenizer(target.path)
    rows = load_rows(config.data, tokenizer, config.seed)
    taps = run_draft_config(config, target).taps
    per_token = bytes_per_token(target.config.hidden_size, len(taps), dtype)
    shard_rows = shard_rows or max(1, _SHARD_BYTES // (per_token * config.data.sequence_length))
    device, compute = resolve_device(config)
    manifest = identity(target, tokenizer, taps, config.data) | _description(rows, config, dtype, compute, shard_rows)
    _check_place(directory, manifest)
    done = _finished(directory, manifest)
    size = rows.tokens * per_token
    missing, free = _check_disk(directory, size, done)
    # Nothing is told before everything that can refuse has been asked.
    note(rows.summary())
    note(f"features take {size / 1e9:.3f} GB, {missing / 1e9:.3f} GB of them to write; {free / 1e9:.3f} GB free")
    if plan_only:
        return None
    write_json(directory / MANIFEST, manifest | {"complete": False, "refused": 0})
    if len(done) < manifest["shards"]:
        model = load_target(config.target, dtype=compute, device=device)
        # The captured steps play no part: a row's valid steps follow from its spans, whatever the run's length.
        source = OnlineCapture(model, rows, taps, 1, capture_rows=config.features.capture_rows)
        _write_missing(directory, source, manifest, done, note)
    refused = sum(done.values())
    write_json(directory / MANIFEST, manifest | {"complete": True, "refused": refused})
    size = sum((directory / shard_name(number)).stat().st_size for number in done)
    return CaptureResult(directory, len(rows) - refused, refused, size)


def _description(
    rows: TrainingRows, config: TrainConfig, dtype: str, compute: torch.dtype, shard_rows: int
) -> dict[str, Any]:
    digest = hashlib.sha256()
    for values in (rows.token_ids, rows.documents, rows.spans):
        digest.update(values.tobytes())
    return {
        "seed": config.seed,
        "rows": len(rows),
        "rows_sha256": digest.hexdigest(),
        "tokens": rows.tokens,
        "supervised": rows.supervised,
        "documents_read": dict(rows.documents_read),
        "dropped": dict(rows.dropped),
        "dtype": dtype,
        "compute_dtype": str(compute).removeprefix("torch."),
        "shard_rows": shard_rows,
        "shards": -(-len(rows) // shard_rows),
    }


def _check_place(directory: Path, manifest: dict[str, Any]) -> None:
    """An existing store must be this one; any other content is left alone."""
    if (directory / MANIFEST).is_file():
        check_same(directory, read_json(directory / MANIFEST), manifest)
    elif directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} is not a feature store, so nothing is written into it")


def _finished(directory: Path, manifest: dict[str, Any]) -> dict[int, int]:
    """Number of every whole shard -> rows refused in it."""
    done = {}
    for number in range(manifest["shards"]):
        try:
            with safe_open(directory / shard_name(number), framework="pt") as file:
                header = file.metadata() or {}
        except (SafetensorError, OSError):
            continue
        if header.get("manifest") == manifest_hash(manifest):
            done[number] = int(header["refused"])
    return done


def _check_disk(directory: Path, size: int, done: dict[int, int]) -> tuple[int, int]:
    """(bytes to write, bytes free); UserError where the features do not fit."""
    place = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    missing = max(0, size - sum((directory / shard_name(number)).stat().st_size for number in done))
    if free < missing:
        raise UserError(f"{place} has {free / 1e9:.3f} GB free, but the features need {missing / 1e9:.3f} GB more")
    return missing, free


def _write_missing(
    directory: Path,
    source: OnlineCapture,
    manifest: dict[str, Any],
    done: dict[int, int],
    note: Callable[[str], None],
) -> None:
    """Writes the shards that are not `done`, and enters them there."""
    count, size = manifest["rows"], manifest["shard_rows"]
    if done:
        note(f"{len(done)} of {manifest['shards']} shards are there already")
    for number in range(manifest["shards"]):
        if number in done:
            continue
        tensors, refused = _shard(source, np.arange(number * size, min(count, (number + 1) * size)), manifest["dtype"])
        # Checked before it is written: as long as the fault lasts, nothing of it stays.
        bad = sum(done.values()) + refused
        if bad > max(1, int(_REFUSED_SHARE * count)):
            raise UserError(
                f"{bad} of {count} rows have features that are not finite: the target or its dtype is at fault"
            )
        header = {"format": "pt", "manifest": manifest_hash(manifest), "refused": str(refused)}
        with atomic_write(directory / shard_name(number)) as file:
            file.write(save(tensors, metadata=header))
        done[number] = refused
        note(f"shard {number + 1} of {manifest['shards']}" + (f", {refused} rows refused" if refused else ""))


def _shard(source: OnlineCapture, indices: np.ndarray, dtype: str) -> tuple[dict[str, Tensor], int]:
    """The tensors of one shard, and how many of its rows were refused because a feature is not finite."""
    parts: dict[str, list[Tensor]] = {name: [] for name in (*LAYOUT[2:], "aux", "final_state")}
    kept, lengths = [], []
    for start in range(0, len(indices), source.capture_rows):
        group = indices[start : start + source.capture_rows]
        features = source.features(group)
        for i, row in enumerate(group):
            length = _checked_length(features, source.rows, i, int(row))
            aux, final = features.aux[i, :length].cpu(), features.final_state[i, :length].cpu()
            if not (aux.isfinite().all() and final.isfinite().all()):
                continue
            kept.append(int(row))
            lengths.append(length)
            for name, values in (("aux", aux), ("final_state", final)):
                parts[name].append(values)
            for name in LAYOUT[2:]:
                parts[name].append(torch.from_numpy(vars(source.rows)[name][row, :length].copy()))
    tensors = {"rows": torch.tensor(kept, dtype=torch.int32), "lengths": torch.tensor(lengths, dtype=torch.int32)}
    if not kept:
        return tensors | {name: torch.zeros(0, dtype=torch.int32) for name in LAYOUT[2:]}, len(indices)
    tensors |= {name: torch.cat(values) for name, values in parts.items()}
    tensors |= _stored_states(tensors["aux"], tensors["final_state"], len(source.taps), dtype)
    return {name: values.contiguous() for name, values in tensors.items()}, len(indices) - len(kept)


def _stored_states(aux: Tensor, final: Tensor, taps: int, dtype: str) -> dict[str, Tensor]:
    if dtype != "fp8":
        return {"aux": aux.to(DTYPES[dtype]), "final_state": final.to(DTYPES[dtype])}
    (aux, aux_scale), (final, final_scale) = quantise(aux, taps), quantise(final, 1)
    return {"aux": aux, "aux_scale": aux_scale, "final_state": final, "final_scale": final_scale}


def _checked_length(features: Features, rows: TrainingRows, place: int, row: int) -> int:
    """Tokens of a row, of which every one must have come back with its features."""
    length = int((rows.documents[row] > 0).sum())
    whole = features.token_ids[place, :length].cpu().numpy()
    if features.aux.shape[1] < length or not np.array_equal(whole, rows.token_ids[row, :length]):
        raise UserError(f"row {row}: the features that came back are not those of its {length} tokens")
    return length
