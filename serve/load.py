"""From names to a running engine: target, draft, tokenizer and cache, with a few lines saying what was chosen."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from draft_model.checkpoint import load_draft
from draft_model.dummy import dummy_draft
from draft_model.model import Eagle3Draft
from draft_model.resolve import ResolvedDraft, resolve_draft
from serve.budget import CostTable
from serve.engine import Engine
from serve.lockstep import LeaderTarget
from serve.measure import measure_costs
from serve.tree import TreeConfig
from serve.workers import TargetPlan, check_plan, lead_target
from target_model.checkpoint import load_target
from target_model.dummy import DummyWeights, dummy_target
from target_model.errors import UserError
from target_model.images import IMAGE_TOKEN, PixelRules, VisionProcessor
from target_model.model import TargetModel
from target_model.resolve import BUNDLED, ResolvedTarget, resolve_target, target_config
from target_model.tokenizer import Tokenizer, load_tokenizer

# Up to this width an operation is too short to be shared out: waiting threads spin, and on a busy machine that costs
# several times what they bring.
SMALL_HIDDEN = 1024


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


def load_engine(
    target: str = "m3-tiny",
    draft: str | None = "eagle3",
    tree: TreeConfig | None = None,
    *,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    draft_dtype: torch.dtype | None = None,
    pages: int | None = None,
    context: int | None = None,
    prefill_tokens: int = 512,
    max_running: int = 32,
    adaptive: bool = False,
    sampling: str = "coupled",
    synthetic_acceptance: float | None = None,
    kv_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype | None = None,
    draft_attention: str = "full",
    dummy: DummyWeights | None = None,
    language_only: bool = True,
    tensor_parallel: int = 1,
) -> tuple[Engine, Tokenizer, Description]:
    """Loads a target and its draft (None: plain decoding), by default in bf16 on a GPU or in fp32 on the CPU.

    The draft only proposes: no answer depends on its precision. By default that is bf16 where the processor computes
    in it, else the target's.

    With `adaptive` a few seconds are spent on measuring what drafting and verifying cost here, and every step drafts as
    far as pays; `tree` does not count. `sampling` and `synthetic_acceptance`: see Engine.

    Without `language_only` the vision tower comes along, where the checkpoint has one.

    With `tensor_parallel` processes the target is split over them (one GPU each, on CUDA); they are started here, and
    `close` on `engine.runner.target.followers` ends them before this process does.

    With `dummy` nothing is loaded but a config: random weights, also of the draft `eagle3`, and the bundled tokenizer.

    Raises UserError for anything missing, damaged or not fitting together.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16)
    if draft is None and (draft_dtype is not None or draft_attention != "full"):
        raise UserError("a type or an attention of the draft is given, but there is no draft")
    resolved = resolve_target(target) if dummy is None else _dummy(target, dummy)
    tokenizer = load_tokenizer(resolved.path)
    chosen = _choose_draft(draft, resolved, dummy)
    plan = TargetPlan(target, tensor_parallel, dtype, device, _threads(resolved, device, tensor_parallel), dummy)
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    model = _load(resolved, plan, language_only=language_only)
    device = str(model.device)
    processor = _pictures(model, tokenizer, resolved.path)
    draft_model = _load_draft(draft, chosen, resolved, model, draft_dtype or _draft_dtype(dtype, device))
    engine = Engine(
        model,
        draft_model,
        tree,
        pages=pages,
        context=context,
        prefill_tokens=prefill_tokens,
        max_running=max_running,
        costs=_measure(model, draft_model, max_running, context) if adaptive else None,
        sampling=sampling,
        synthetic_acceptance=synthetic_acceptance,
        kv_dtype=kv_dtype,
        index_dtype=index_dtype,
        draft_attention=draft_attention,
    )
    lines = (
        f"target {resolved.name}: {resolved.path if dummy is None else dummy}",
        *_processes(model),
        _why(draft, chosen),
        *([_speculation(engine)] if draft_model is not None else []),
        "pictures: yes" if processor is not None else "pictures: no, the vision tower is not loaded",
        *_memory_plan(engine, model, draft_model, _place(device, tensor_parallel), dtype),
    )
    defaults = _sampling_defaults(resolved)
    return engine, tokenizer, Description(resolved.name, chosen and str(chosen.path), defaults, lines, processor)


def _measure(target: TargetModel, draft: Eagle3Draft | None, max_running: int, context: int | None) -> CostTable:
    if draft is None:
        raise UserError("an adaptive tree needs a draft")
    limit = min(context or target.config.max_position, target.config.max_position)
    return measure_costs(target, draft, max_running=max_running, context=limit)


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


def _dummy(target: str, dummy: DummyWeights) -> ResolvedTarget:
    """A target of which only the config is at hand; its tokenizer stands in for the real one."""
    config = dummy.config(target_config(target))
    return ResolvedTarget(target, BUNDLED / "m3-tiny", config)


def _threads(target: ResolvedTarget, device: str, processes: int) -> int | None:
    """CPU threads of each process; None: as many as torch takes."""
    if torch.device(device).type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return None
    if target.config.hidden_size <= SMALL_HIDDEN:
        return 1
    return None if processes == 1 else max(1, (os.cpu_count() or 1) // processes)


def _load(resolved: ResolvedTarget, plan: TargetPlan, *, language_only: bool = True) -> TargetModel:
    options = {"dtype": plan.dtype, "device": plan.device}
    if plan.size > 1:
        check_plan(resolved.config, plan)
        return lead_target(plan, resolved.config, language_only=language_only)
    if plan.dummy is None:
        return load_target(plan.target, language_only=language_only, **options)
    return dummy_target(resolved.name, resolved.config, plan.dummy.format_name, **options)


def _processes(target: TargetModel) -> list[str]:
    if not isinstance(target, LeaderTarget):
        return []
    crew = target.followers
    others = ", ".join(map(str, crew.process_ids))
    return [f"split over {crew.size} processes: this one, {os.getpid()}, leads {others}"]


def _pictures(target: TargetModel, tokenizer: Tokenizer, path: Path) -> VisionProcessor | None:
    if target.vision is None:
        return None
    token = target.config.image_token_id
    if token is None or tokenizer.special.get(IMAGE_TOKEN) != token:
        raise UserError(
            f"{path}: the placeholder {IMAGE_TOKEN} is {tokenizer.special.get(IMAGE_TOKEN)} in tokenizer.json and "
            f"{token} in config.json: load the language model only, or mend them"
        )
    return VisionProcessor(target.vision.config, PixelRules.read(path, target.vision.config))


def _choose_draft(draft: str | None, target: ResolvedTarget, dummy: DummyWeights | None) -> ResolvedDraft | None:
    """The draft to load; None for plain decoding, and where it is to be random as the target is."""
    if draft is None or (dummy is not None and draft == "eagle3"):
        return None
    return resolve_draft(draft, target)


def _draft_dtype(target: torch.dtype, device: str) -> torch.dtype:
    """A draft of one or two rows at a time waits for its weights to be read: half as many bytes, half the wait."""
    cpu = torch.cpu if torch.device(device).type == "cpu" else None
    computes_bf16 = cpu is not None and (cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())
    return torch.bfloat16 if computes_bf16 else target


def _load_draft(
    draft: str | None,
    chosen: ResolvedDraft | None,
    resolved: ResolvedTarget,
    target: TargetModel,
    dtype: torch.dtype,
) -> Eagle3Draft | None:
    if draft is None:
        return None
    if chosen is None:
        return dummy_draft(resolved.config, dtype=dtype, device=target.device)
    model = load_draft(chosen.path, dtype, target.device, chosen.default_taps)
    check_pair(target, model, chosen.path)
    return model


def _why(draft: str | None, chosen: ResolvedDraft | None) -> str:
    if draft is None:
        return "no draft: plain decoding"
    return "draft eagle3: random weights" if chosen is None else chosen.why


def check_pair(target: TargetModel, draft: Eagle3Draft, path: Path) -> None:
    """UserError where the draft at `path` is not one for this target."""
    for name, ours, theirs in (
        ("target_hidden_size", draft.config.target_hidden_size, target.config.hidden_size),
        ("vocab_size", draft.config.vocab_size, target.config.vocab_size),
    ):
        if ours != theirs:
            raise UserError(
                f"draft {path}: its {name} is {ours}, but the target has {theirs}: they do not belong together"
            )
    target.check_taps(draft.config.taps)


def _place(device: str, processes: int) -> str:
    return device if processes == 1 else f"{device} of the first process"


def _memory_plan(
    engine: Engine, target: TargetModel, draft: Eagle3Draft | None, place: str, dtype: torch.dtype
) -> list[str]:
    def size(module: torch.nn.Module | None) -> int:
        return sum(p.numel() * p.element_size() for p in module.parameters()) if module is not None else 0

    cache = engine.runner.cache
    slots = engine.scheduler.allocator.total * engine.scheduler.page_size
    return [
        f"memory on {place}, {_type_name(dtype)}: target {_bytes(size(target))}, draft {_bytes(size(draft))}"
        f"{'' if draft is None else ' (' + _type_name(draft.dtype) + ')'}, cache "
        f"{_bytes(slots * cache.bytes_per_token())} ({slots} tokens of {_bytes(cache.bytes_per_token())}; KV "
        f"{_type_name(cache.k.dtype)}, index K {_type_name(cache.index_k.dtype)})",
        f"context: {usable_context(engine)} tokens a request, answer included",
    ]


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


def _sampling_defaults(target: ResolvedTarget) -> SamplingDefaults:
    path = target.path / "generation_config.json"
    if not path.exists():
        return SamplingDefaults()
    values = json.loads(path.read_text(encoding="utf-8"))
    if not values.get("do_sample", True):
        return SamplingDefaults(temperature=0.0)
    return SamplingDefaults(**{name: values[name] for name in ("temperature", "top_p", "top_k") if name in values})
