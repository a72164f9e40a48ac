"""Rows of text from where they lie: JSONL, parquet, directories, the hub, the package; several sources, also mixed."""

import gzip
import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from target_model.errors import UserError
from train.config import DataConfig, SourceConfig

_JSONL = (".jsonl", ".jsonl.xz", ".jsonl.gz", ".json")
_OPENERS = {".xz": lzma.open, ".gz": gzip.open}
# What a damaged or unknown file makes `datasets` and the decompressors raise.
_FAILURES = (OSError, EOFError, UnicodeError, ValueError, lzma.LZMAError, datasets.exceptions.DatasetsError)


@dataclass(frozen=True)
class RawRow:
    """A row as it was written, where it stands, and the source it came from."""

    values: dict[str, Any]
    where: str
    source: SourceConfig


def read_rows(config: DataConfig, seed: int) -> Iterator[RawRow]:
    """The rows of all sources, at most `max_documents`: one source after the other, or mixed by their weights.

    The mixture is a function of the seed alone: before every row a source is drawn with a chance proportional to its
    weight. With `exhausted` "stop" the rows end where a drawn source has none left; with "repeat" such a source starts
    over, and they end when every source has been read to its end.
    """
    sources = source_list(config)
    streams = [_numbered(source, config.streaming) for source in sources]
    rows = (row for stream in streams for row in stream)
    if any(source.weight is not None for source in sources):
        rows = _mixed(sources, config, seed)
    for count, row in enumerate(rows):
        if count == config.max_documents:
            return
        yield row


def source_list(config: DataConfig) -> list[SourceConfig]:
    """`data.path` in the form of `data.sources`."""
    if config.sources is not None:
        return config.sources
    return [SourceConfig(path=path) for path in ([config.path] if isinstance(config.path, str) else config.path)]


def read_file(name: str, streaming: bool = True) -> Iterator[tuple[dict[str, Any], str]]:
    """(row, where it stands) of one path as `data.path` takes it."""
    if name.startswith("hub:"):
        return _hub(name.removeprefix("hub:"), streaming)
    if name.startswith("bundled:"):
        return _json_lines(bundled_path(name.removeprefix("bundled:")))
    path = Path(name)
    if not path.is_dir():
        return _file(path, streaming)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return _saved(path)
    files = sorted(p for p in path.rglob("*") if p.name.endswith((*_JSONL, ".parquet")))
    if not files:
        raise UserError(f"data directory {path} holds no file of the kinds {', '.join((*_JSONL, '.parquet'))}")
    return (row for file in files for row in _file(file, streaming))


def bundled_path(name: str) -> Path:
    """A data file that comes with the package."""
    path = Path(str(resources.files("train"))) / "bundled" / f"{name}.jsonl.xz"
    if not path.is_file():
        raise UserError(f"no bundled data set {name} ({path.name} is not in the package)")
    return path


def _numbered(source: SourceConfig, streaming: bool) -> Iterator[RawRow]:
    for values, where in read_file(source.path, streaming):
        yield RawRow(values, where, source)


def _mixed(sources: Sequence[SourceConfig], config: DataConfig, seed: int) -> Iterator[RawRow]:
    weights = np.array([source.weight for source in sources])
    generator = np.random.default_rng([seed, 4])
    streams = [_numbered(source, config.streaming) for source in sources]
    ended: set[int] = set()
    while True:
        chosen = int(generator.choice(len(sources), p=weights / weights.sum()))
        row = next(streams[chosen], None)
        if row is None:
            ended.add(chosen)
            if config.exhausted == "stop" or len(ended) == len(sources):
                return
            streams[chosen] = _numbered(sources[chosen], config.streaming)
            row = next(streams[chosen], None)
            if row is None:
                raise UserError(f"the data set {sources[chosen].path} is empty")
        yield row


def _file(path: Path, streaming: bool) -> Iterator[tuple[dict[str, Any], str]]:
    if path.suffix != ".parquet":
        return _json_lines(path)
    if not path.is_file():
        raise UserError(f"data file {path} does not exist")
    return _table(
        path, lambda: datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=streaming)
    )


def _saved(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    if (path / "dataset_dict.json").is_file():
        raise UserError(f"{path} holds several splits: name the directory of one of them")
    return _table(path, lambda: datasets.load_from_disk(str(path)))


def _hub(name: str, streaming: bool) -> Iterator[tuple[dict[str, Any], str]]:
    """`OWNER/NAME` or `OWNER/NAME:SPLIT`. Code that comes with a data set is never executed."""
    repository, _, split = name.partition(":")
    return _table(name, lambda: datasets.load_dataset(repository, split=split or "train", streaming=streaming))


def _table(where: str | Path, load: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Rows of a table. A column that a row does not have comes back as None, so these are left out."""
    try:
        for number, row in enumerate(load(), 1):
            yield {key: value for key, value in row.items() if value is not None}, f"{where}:{number}"
    except _FAILURES as error:
        raise UserError(f"data set {where} cannot be read: {' '.join(str(error).split())}") from None


def _json_lines(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    # Not through `datasets`: its tables give every row the keys of all, and lose the number of a line that is wrong.
    try:
        with _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            yield from parse_lines(file, str(path))
    except FileNotFoundError:
        raise UserError(f"data file {path} does not exist") from None
    except (OSError, EOFError, UnicodeError, lzma.LZMAError) as error:
        raise UserError(f"data file {path} cannot be read: {error}") from None


def parse_lines(lines: Iterable[str], where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The JSON objects of the lines, empty ones left out, each with its place."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where}:{number} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise UserError(f"{where}:{number} must be a JSON object")
        yield value, f"{where}:{number}"
