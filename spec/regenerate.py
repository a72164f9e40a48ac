"""Rewrites the answers of conversations with the target's own text: what a draft will be asked to predict.

Each output row holds the conversation up to one assistant turn, the target's answer, and the exact token ids
(`token_ids`, of which those from `answer_start` on are the answer): text alone would not always be tokenised again the
way it was produced.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from serve.engine import Engine
from serve.request import Completion, Request, SamplingParams, Update
from target_model.errors import UserError, check_output
from target_model.tokenizer import Tokenizer
from train.data import tools_of
from train.sources import parse_lines, read_file


@dataclass(frozen=True)
class Settings:
    """What to answer and how. `turns`: the first assistant turn of each conversation, or all of them (each behind the
    original ones).

    `part` of `parts`: with several processes, each takes its share of the rows. Temperature 0 is greedy; `seed` and the
    row give the noise.
    """

    sources: tuple[str, ...]
    output: Path
    turns: str = "first"
    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 40
    max_tokens: int = 512
    thinking_mode: str = "disabled"
    seed: int = 0
    concurrency: int = 32
    limit: int | None = None
    part: int = 0
    parts: int = 1

    def __post_init__(self):
        if self.turns not in ("first", "all"):
            raise UserError(f"turns must be first or all, got {self.turns!r}")
        if not 0 <= self.part < self.parts:
            raise UserError(f"part must be from 0 to {self.parts - 1}, got {self.part}")
        check_output(self.output)


def run(engine: Engine, tokenizer: Tokenizer, settings: Settings) -> dict[str, int]:
    """Appends the missing rows to the output; started again after an interruption it goes on where it stopped. Returns
    counts.
    """
    prompts, skipped = _prompts(tokenizer, settings, engine.context)
    done = _finished(settings.output)
    todo = [prompt for prompt in prompts if prompt["id"] not in done]
    tokens = 0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    with open(settings.output, "a", encoding="utf-8") as file, progress:
        task = progress.add_task("answers", total=len(todo))
        for prompt, completion in _answers(engine, settings, todo):
            tokens += len(completion.token_ids)
            _write(file, prompt, completion, tokenizer)
            progress.advance(task)
    return {"answered": len(todo), "already there": len(prompts) - len(todo), "left out": skipped, "tokens": tokens}


def _prompts(tokenizer: Tokenizer, settings: Settings, context: int) -> tuple[list[dict[str, Any]], int]:
    """The prompts of this part, and how many rows had none or one that leaves no room for an answer."""
    prompts, skipped = [], 0
    for number, raw in enumerate(row for source in settings.sources for row, _ in read_file(source)):
        if settings.limit is not None and number >= settings.limit:
            break
        if number % settings.parts != settings.part:
            continue
        messages = raw.get("messages")
        turns = (
            [i for i, m in enumerate(messages) if m.get("role") == "assistant"] if isinstance(messages, list) else []
        )
        name = raw.get("id") or hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()[:16]
        usable = 0
        for turn in turns[:1] if settings.turns == "first" else turns:
            ids = tokenizer.render_chat(messages[:turn], tools_of(raw), thinking_mode=settings.thinking_mode)
            if len(ids) + 1 < context:
                usable += 1
                prompts.append(
                    {**raw, "id": f"{name}/{turn}", "messages": messages[:turn], "token_ids": ids, "row": number}
                )
        skipped += usable == 0
    if not prompts:
        raise UserError(f"no conversation of {', '.join(settings.sources)} has an assistant turn to answer")
    return prompts, skipped


def _finished(output: Path) -> set[str]:
    """Ids in the output; a last line cut off by a crash is removed."""
    if not output.exists():
        return set()
    data = output.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(output, whole)
    return {row["id"] for row, _ in parse_lines(data[:whole].decode().splitlines(), str(output))}


def _answers(engine: Engine, settings: Settings, todo: list[dict]) -> Iterator[tuple[dict, Completion]]:
    """Keeps `concurrency` requests in flight and yields answers as they end."""
    waiting, running = iter(todo), {}
    updates: dict[str, list[Update]] = {}
    while True:
        while len(running) < settings.concurrency and (prompt := next(waiting, None)) is not None:
            params = SamplingParams(
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                seed=settings.seed,
                max_tokens=settings.max_tokens,
            )
            # The row's number makes the noise of one seed differ from row to row.
            engine.add(Request(prompt["id"], prompt["token_ids"], params, choice_index=prompt["row"]))
            running[prompt["id"]], updates[prompt["id"]] = prompt, []
        if not running:
            return
        for update in engine.step():
            updates[update.id].append(update)
            if update.finish_reason is not None:
                yield running.pop(update.id), Completion.of(updates.pop(update.id))


def _write(file: TextIO, prompt: dict, completion: Completion, tokenizer: Tokenizer) -> None:
    answer = {"role": "assistant", "content": tokenizer.decode(completion.token_ids)}
    ids = (
        prompt["token_ids"] + completion.token_ids + ([] if completion.stop_token is None else [completion.stop_token])
    )
    row = {key: value for key, value in prompt.items() if key != "row"}
    row |= {"messages": [*prompt["messages"], answer], "token_ids": ids, "answer_start": len(prompt["token_ids"])}
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()
