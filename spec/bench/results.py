"""The result of an acceptance benchmark as JSON: what was measured, with what is needed to read and to repeat it."""

import json
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch

from spec import __version__
from spec.bench.bootstrap import interval
from spec.bench.statistics import DEFINITIONS, NOTHING
from spec.bench.sweep import Answer, Row
from target_model.errors import UserError

FORMAT = 2
PER_ANSWER = ("steps", "drafted", "accepted", "emitted")


def result_json(rows: Sequence[Row], settings: dict[str, Any], pairs: dict[str, str]) -> dict[str, Any]:
    """`pairs` says for each draft which files it and its target are."""
    device = torch.cuda.get_device_name() if settings["device"] != "cpu" and torch.cuda.is_available() else "cpu"
    return {
        "benchmark": "acceptance",
        "format": FORMAT,
        "command": shlex.join(["spec", *sys.argv[1:]]),
        "settings": settings,
        "pairs": pairs,
        "definitions": DEFINITIONS,
        "versions": {
            "spec": __version__,
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
        "machine": {"platform": platform.platform(), "device": device, "threads": torch.get_num_threads()},
        "rows": [row_json(row) for row in rows],
    }


def row_json(row: Row) -> dict[str, Any]:
    """One row with its intervals, its categories, and one entry an answer, from which all of it can be worked out."""
    prompts = [answer.prompt for answer in row.answers]
    emitted, steps = ([getattr(answer.acceptance, name) for answer in row.answers] for name in ("emitted", "steps"))
    plain, spent = [answer.plain_time.decode for answer in row.answers], [answer.time.decode for answer in row.answers]
    return {
        "suite": row.suite,
        "draft": row.draft,
        "label": row.label,
        "tree": asdict(row.shape),
        **asdict(row.condition),
        **row.acceptance.to_json(),
        "AL_interval": interval(prompts, emitted, steps),
        "prompts": row.prompts,
        "answers": len(row.answers),
        "identical_to_plain": row.identical,
        "tokens": row.tokens,
        "seconds": row.time.to_json(),
        "plain_seconds": row.plain_time.to_json(),
        "speed_up": row.speed_up,
        "decode_speed_up": row.decode_speed_up,
        "decode_speed_up_interval": interval(prompts, plain, spent),
        "categories": _categories(row.answers),
        "by_answer": {
            "prompt": prompts,
            "turn": [answer.turn for answer in row.answers],
            "seed": [answer.seed for answer in row.answers],
            **{name: [getattr(answer.acceptance, name) for answer in row.answers] for name in PER_ANSWER},
            "identical": [answer.identical for answer in row.answers],
            "decode_seconds": [round(value, 6) for value in spent],
            "plain_decode_seconds": [round(value, 6) for value in plain],
        },
    }


def _categories(answers: Sequence[Answer]) -> dict[str, float | None]:
    """AL by category; none where there is only one."""
    names = dict.fromkeys(answer.category for answer in answers)
    if len(names) < 2:
        return {}
    return {
        name or "none": sum((a.acceptance for a in answers if a.category == name), NOTHING).length for name in names
    }


def read_result(path: str | Path) -> dict[str, Any]:
    """Reads what `spec bench acceptance --json` wrote. UserError for anything else."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error.msg}") from None
    if not isinstance(result, dict) or result.get("benchmark") != "acceptance":
        raise UserError(f"{path} is no result of spec bench acceptance")
    if result.get("format") != FORMAT:
        raise UserError(f"{path} was written by another version of spec: measure again")
    return result
