"""From names to a running engine: target, draft, tokenizer and cache."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from draft_model.checkpoint import load_draft
from draft_model.dummy import dummy_draft
from draft_model.model import Eagle3Draft
from draft_model.quantised import draft_format, quantise_draft
from draft_model.resolve import ResolvedDraft, resolve_draft
from serve.budget import CostTable
from serve.description import Description, describe, sampling_defaults
from serve.engine import Engine
from serve.measure import measure_costs
from serve.tree import TreeConfig
from serve.warm_up import warm_up
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
class EngineOptions:
    """What to load, and how to serve it. None: the default of the engine, or of the machine.

    draft: None for plain decoding. device, dtype: bf16 on a GPU, fp32 on the CPU. draft_dtype: no answer depends on it,
    as the draft only proposes; bf16 where the processor computes in it, else the target's. draft_weights: "mxfp8" or
    "mxfp4" quantises what the draft multiplies with when it is loaded. adaptive: a few seconds are spent on measuring
    what drafting and verifying cost here, and every step drafts as far as pays; `tree` does not count. language_only:
    the vision tower stays on disk. tensor_parallel: processes that the target is split over (one GPU each, on CUDA).
    prefill_tokens: 512 on a CPU, 4096 on a GPU, which computes so many hardly slower than a few. warm_up: on a
    GPU, compile and capture what requests of usual sizes need before anybody waits for it.
    dummy: nothing is loaded but a config; random weights, also of the draft `eagle3`, and the bundled tokenizer. The
    others: see Engine.
    """

    target: str = "m3-tiny"
    draft: str | None = "eagle3"
    tree: TreeConfig | None = None
    device: str | None = None
    dtype: torch.dtype | None = None
    draft_dtype: torch.dtype | None = None
    draft_weights: str | None = None
    pages: int | None = None
    context: int | None = None
    prefill_tokens: int | None = None
    max_running: int = 32
    adaptive: bool = False
    sampling: str = "coupled"
    synthetic_acceptance: float | None = None
    kv_dtype: torch.dtype | None = None
    index_dtype: torch.dtype | None = None
    draft_attention: str = "full"
    device_step: bool | None = None
    dummy: DummyWeights | None = None
    language_only: bool = True
    tensor_parallel: int = 1
    warm_up: bool = False


def load_engine(options: EngineOptions) -> tuple[Engine, Tokenizer, Description]:
    """Loads a target and its draft. With `tensor_parallel`, `close` on `engine.runner.target.followers` ends the other
    processes before this one does.

    Raises UserError for anything missing, damaged or not fitting together.
    """
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = options.dtype or (torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16)
    form = draft_format(options.draft_weights)
    if options.draft is None and (options.draft_dtype or form or options.draft_attention != "full"):
        raise UserError("a type, weights or an attention of the draft are given, but there is no draft")
    resolved = resolve_target(options.target) if options.dummy is None else _dummy(options.target, options.dummy)
    tokenizer = load_tokenizer(resolved.path)
    chosen = _choose_draft(options.draft, resolved, options.dummy)
    model = _load(resolved, options, dtype, device)
    processor = _pictures(model, tokenizer, resolved.path)
    draft = _load_draft(options, chosen, resolved, model)
    if form is not None:
        quantise_draft(draft, form)
    engine = Engine(
        model,
        draft,
        options.tree,
        pages=options.pages,
        context=options.context,
        prefill_tokens=options.prefill_tokens or (512 if torch.device(device).type == "cpu" else 4096),
        max_running=options.max_running,
        costs=_measure(model, draft, options) if options.adaptive else None,
        sampling=options.sampling,
        synthetic_acceptance=options.synthetic_acceptance,
        kv_dtype=options.kv_dtype,
        index_dtype=options.index_dtype,
        draft_attention=options.draft_attention,
        device_step=options.device_step,
    )
    if options.warm_up and (engine.runner.device_step or engine.runner.device.type == "cuda"):
        warm_up(engine)
    source = f"{resolved.name}: {resolved.path if options.dummy is None else options.dummy}"
    lines = describe(engine, source, options.draft, chosen, processor is not None)
    draft_path = None if chosen is None else str(chosen.path)
    return (
        engine,
        tokenizer,
        Description(resolved.name, draft_path, sampling_defaults(resolved.path), lines, processor),
    )


def _measure(target: TargetModel, draft: Eagle3Draft | None, options: EngineOptions) -> CostTable:
    if draft is None:
        raise UserError("an adaptive tree needs a draft")
    limit = min(options.context or target.config.max_position, target.config.max_position)
    device_step = False if options.sampling == "rejection" else options.device_step
    with Console(stderr=True).status("measuring what drafting and verifying cost here"):
        return measure_costs(target, draft, max_running=options.max_running, context=limit, device_step=device_step)


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


def _load(resolved: ResolvedTarget, options: EngineOptions, dtype: torch.dtype, device: str) -> TargetModel:
    processes, dummy = options.tensor_parallel, options.dummy
    # It keeps a kernel for every number of rows that ever came, a megabyte each.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    threads = _threads(resolved, device, processes)
    if threads is not None:
        torch.set_num_threads(threads)
    if processes > 1:
        plan = TargetPlan(options.target, processes, dtype, device, threads, dummy)
        check_plan(resolved.config, plan)
        return lead_target(plan, resolved.config, language_only=options.language_only)
    if dummy is not None:
        return dummy_target(resolved.name, resolved.config, dummy.format_name, dtype=dtype, device=device)
    return load_target(options.target, dtype=dtype, device=device, language_only=options.language_only)


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


def _draft_dtype(target: TargetModel) -> torch.dtype:
    """A draft of one or two rows at a time waits for its weights to be read: half as many bytes, half the wait."""
    on_cpu = target.device.type == "cpu"
    computes_bf16 = on_cpu and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return torch.bfloat16 if computes_bf16 else target.dtype


def _load_draft(
    options: EngineOptions, chosen: ResolvedDraft | None, resolved: ResolvedTarget, target: TargetModel
) -> Eagle3Draft | None:
    dtype = options.draft_dtype or _draft_dtype(target)
    if options.draft is None:
        return None
    if chosen is None:
        return dummy_draft(resolved.config, dtype=dtype, device=target.device)
    model = load_draft(chosen.path, dtype, target.device, chosen.default_taps)
    model.config.check_target(resolved.config, chosen.path)
    return model
