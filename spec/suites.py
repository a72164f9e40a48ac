"""Prompt suites: the bundled ones and any JSONL file with `turns`, `messages` or `prompt`."""

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from target_model.errors import UserError

BENCHMARKS = ("mt_bench", "humaneval", "gsm_symbolic")
HELD_OUT = "held_out"  # judges checkpoints in training, so that the benchmarks choose nothing
BUNDLED = (*BENCHMARKS, HELD_OUT)


@dataclass(frozen=True)
class Prompt:
    """One question: `turns` holds the user's messages in order. The benchmarks ask the first one."""

    id: str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Suite:
    name: str
    prompts: tuple[Prompt, ...]


def load_suite(name_or_path: str, limit: int | None = None) -> Suite:
    """Reads a bundled suite by name, or a JSONL file by path; `limit` keeps the first prompts.

    Raises UserError for an unknown name, an empty file, or a line that holds no prompt.
    """
    if name_or_path in BUNDLED:
        name, text = name_or_path, (files("spec") / "prompts" / f"{name_or_path}.jsonl").read_text(encoding="utf-8")
    else:
        path = Path(name_or_path)
        if not path.is_file():
            raise UserError(
                f"no such suite: {name_or_path} (bundled: {', '.join(BUNDLED)}; or the path of a JSONL file)"
            )
        try:
            name, text = path.stem, path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text: {error}") from None
    prompts = [
        _parse_line(line, number, name_or_path) for number, line in enumerate(text.splitlines(), 1) if line.strip()
    ]
    if not prompts:
        raise UserError(f"{name_or_path} holds no prompts")
    return Suite(name, tuple(prompts[:limit]))


def _parse_line(line: str, number: int, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} line {number} is not JSON: {error.msg}") from None
    turns = _user_turns(row) if isinstance(row, dict) else None
    if not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise UserError(
            f"{where} line {number} has no prompt: expected `turns`, `messages` with a user turn, or `prompt`"
        )
    return Prompt(str(row.get("id", number)), str(row.get("category", "")), tuple(turns))


def _user_turns(row: dict) -> list | None:
    if isinstance(row.get("turns"), list):
        return row["turns"]
    if isinstance(row.get("messages"), list):
        return [m.get("content") for m in row["messages"] if isinstance(m, dict) and m.get("role") == "user"]
    return [row["prompt"]] if "prompt" in row else None
