"""Prompt suites: the bundled ones, and files: JSONL or Parquet with `turns`, `messages` or `prompt`.

Spec-Bench (`data/spec_bench/question.jsonl`) and SPEED-Bench (Parquet, or the JSONL that its preparation writes) have
`question_id`, `category` and `turns`. Neither is bundled: SPEED-Bench's licence allows evaluation only.
"""

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from target_model.errors import UserError

BENCHMARKS = ("mt_bench", "humaneval", "gsm_symbolic")
HELD_OUT = "held_out"  # judges checkpoints in training, so that the benchmarks choose nothing
BUNDLED = (*BENCHMARKS, HELD_OUT)
# SPEED-Bench publishes this in place of texts that it may not pass on; its own preparation script fetches them.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"


@dataclass(frozen=True)
class Prompt:
    """One question: `turns` holds the user's messages in order."""

    id: str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Suite:
    name: str
    prompts: tuple[Prompt, ...]


def load_suite(name_or_path: str, limit: int | None = None) -> Suite:
    """Reads a bundled suite by name, or a file by path; `limit` keeps the first prompts.

    Raises UserError for an unknown name, an empty file, or a line (or row) that holds no prompt.
    """
    if name_or_path in BUNDLED:
        text = (files("spec") / "prompts" / f"{name_or_path}.jsonl").read_text(encoding="utf-8")
        name, rows = name_or_path, _json_lines(text, name_or_path)
    else:
        path = Path(name_or_path)
        if not path.is_file():
            raise UserError(
                f"no such suite: {name_or_path} (bundled: {', '.join(BUNDLED)}; or the path of a JSONL or Parquet file)"
            )
        name, rows = _name(path), _parquet_rows(path) if path.suffix == ".parquet" else _file_lines(path)
    prompts = [_prompt(row, number, name_or_path) for number, row in rows]
    if not prompts:
        raise UserError(f"{name_or_path} holds no prompts")
    return Suite(name, tuple(prompts[:limit]))


def _name(path: Path) -> str:
    """Of the file, or of its directory where the file's says nothing: Spec-Bench's and the hub's do not."""
    return path.resolve().parent.name if path.stem == "question" or path.stem.startswith("test-") else path.stem


def _file_lines(path: Path) -> list[tuple[int, object]]:
    try:
        return _json_lines(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from None


def _json_lines(text: str, where: str) -> list[tuple[int, object]]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append((number, json.loads(line)))
            except json.JSONDecodeError as error:
                raise UserError(f"{where} line {number} is not JSON: {error.msg}") from None
    return rows


def _parquet_rows(path: Path) -> list[tuple[int, object]]:
    import pyarrow
    from pyarrow import parquet

    try:
        return list(enumerate(parquet.read_table(path).to_pylist(), 1))
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is no Parquet file: {' '.join(str(error).split())}") from None


def _prompt(row: object, number: int, where: str) -> Prompt:
    turns = _user_turns(row) if isinstance(row, dict) else None
    if not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise UserError(
            f"{where} line {number} has no prompt: expected `turns`, `messages` with a user turn, or `prompt`"
        )
    if any(turn.startswith(PLACEHOLDER) for turn in turns):
        raise UserError(f"{where} line {number} holds SPEED-Bench's placeholder: run its preparation script first")
    name = row.get("id", row.get("question_id", number))
    return Prompt(str(name), str(row.get("category") or ""), tuple(turns))


def _user_turns(row: dict) -> list | None:
    if isinstance(row.get("turns"), list):
        return row["turns"]
    if isinstance(row.get("messages"), list):
        return [m.get("content") for m in row["messages"] if isinstance(m, dict) and m.get("role") == "user"]
    return [row["prompt"]] if "prompt" in row else None
