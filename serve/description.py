"""What is being served, told to people at the start, and what requests are sampled with by default."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from draft_model.model import Eagle3Draft
from draft_model.quantised import stored_as
from draft_model.resolve import ResolvedDraft
from serve.engine import Engine
from serve.lockstep import LeaderTarget
from target_model.images import VisionProcessor
from target_model.model import TargetModel


@dataclass(frozen=True)
class SamplingDefaults:
    """What a request that does not say otherwise is sampled with: the checkpoint's generation_config.json."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class Description:
    """What is being served. `lines` are for people. `pictures` prepares them for the target, None when it sees none."""

    target: str
    draft: str | None
    defaults: SamplingDefaults
    lines: tuple[str, ...]
    pictures: VisionProcessor | None = None


def describe(
    engine: Engine, target: str, draft: str | None, chosen: ResolvedDraft | None, pictures: bool
) -> tuple[str, ...]:
    """Lines on the models, the speculation, the processes and the memory. `target` says what it is and where from;
    `chosen` is None for a draft with random weights.
    """
    model = engine.runner.target
    return (
        f"target {target}",
        *_processes(model),
        _why(draft, chosen),
        *([_speculation(engine)] if draft is not None else []),
        "pictures: yes" if pictures else "pictures: no, the vision tower is not loaded",
        *_memory_plan(engine),
    )


def _speculation(engine: Engine) -> str:
    if engine.runner.synthetic is not None:
        length = engine.runner.synthetic.length
        return f"SYNTHETIC acceptance length {length:g}, {engine.tree}: for benchmarks only, the text is meaningless"
    shape = "adaptive, by measured costs" if engine.budget is not None else str(engine.tree)
    line = f"speculation: {shape}" + (", rejection sampling" if engine.runner.rejection else "")
    chosen = engine.runner.drafter.chosen
    if chosen is not None:
        line += f"; the draft attends to the blocks that layer {chosen.layer} chose"
    named = engine.runner.drafter.draft.config.max_position
    if named < engine.context:
        line += f"; the draft's config names {named} positions, it goes on drafting behind them, up to {engine.context}"
    return line


def usable_context(engine: Engine) -> int:
    """Tokens of prompt and answer that one request can have: the context, or less where the cache is smaller."""
    scheduler = engine.scheduler
    return min(engine.context, scheduler.allocator.total * scheduler.page_size - scheduler.limits.scratch)


def _processes(target: TargetModel) -> list[str]:
    if not isinstance(target, LeaderTarget):
        return []
    crew = target.followers
    others = ", ".join(map(str, crew.process_ids))
    return [f"split over {crew.size} processes: this one, {os.getpid()}, leads {others}"]


def _why(draft: str | None, chosen: ResolvedDraft | None) -> str:
    if draft is None:
        return "no draft: plain decoding"
    return "draft eagle3: random weights" if chosen is None else chosen.why


def _memory_plan(engine: Engine) -> list[str]:
    def size(module: torch.nn.Module | None) -> int:
        return sum(p.numel() * p.element_size() for p in module.parameters()) if module is not None else 0

    cache, target = engine.runner.cache, engine.runner.target
    draft = engine.runner.drafter.draft if engine.runner.drafter else None
    place = f"{target.device} of the first process" if isinstance(target, LeaderTarget) else str(target.device)
    slots = engine.scheduler.allocator.total * engine.scheduler.page_size
    return [
        f"memory on {place}, {_type_name(target.dtype)}: target {_bytes(size(target))}, draft {_bytes(size(draft))}"
        f"{'' if draft is None else ' (' + _draft_type(draft) + ')'}, cache "
        f"{_bytes(slots * cache.bytes_per_token())} ({slots} tokens of {_bytes(cache.bytes_per_token())}; KV "
        f"{_type_name(cache.k.dtype)}, index K {_type_name(cache.index_k.dtype)})",
        f"context: {usable_context(engine)} tokens a request, answer included",
    ]


def _draft_type(draft: Eagle3Draft) -> str:
    form = stored_as(draft)
    return _type_name(draft.dtype) + ("" if form is None else f", products in {form.name}")


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


def sampling_defaults(directory: Path) -> SamplingDefaults:
    """Those that the checkpoint in this directory asks for."""
    path = directory / "generation_config.json"
    if not path.exists():
        return SamplingDefaults()
    values = json.loads(path.read_text(encoding="utf-8"))
    if not values.get("do_sample", True):
        return SamplingDefaults(temperature=0.0)
    return SamplingDefaults(**{name: values[name] for name in ("temperature", "top_p", "top_k") if name in values})
