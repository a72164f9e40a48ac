"""`spec bench train`: the draft's training step at MiniMax-M3's real size, against a plain PyTorch implementation.

Features are random, every token is supervised. "ours" is the engine of `spec train`: DeepSpeed, only rows that count,
flash attention merged with the own column, linear + KL in chunks. "plain" is what one would write first: autocast over
fp32 weights, all rows at all steps, flex attention over the keys of all steps, full logits. Both make whole optimizer
steps (fused AdamW, clipping), one after the other in the same run.

MFU = train.flops.step_flops / (seconds of a step * train.flops.peak_flops): products that the mathematics needs, the
same number for both, nothing for what is worked out twice.
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from draft_model.config import DraftConfig
from draft_model.model import Eagle3Draft
from spec.bench.plain_step import flex_rows, masked_rows, plain_loss
from target_model.errors import UserError, write_json
from target_model.kernels import ops
from train.config import TrainConfig, parse_config
from train.data import valid_steps
from train.engine import DraftEngine, processes, resolve_device
from train.features import Features, document_positions
from train.flops import peak_flops, step_flops
from train.loss import Teacher, count_rows, step_weights

_ADAM = {"lr": 1e-4, "betas": (0.9, 0.95)}


@dataclass(frozen=True)
class Settings:
    """`long` is the length of the second row of measurements, 0 for none. `small` shrinks the draft for a trial."""

    sequence: int = 4096
    long: int = 32768
    ttt_steps: int = 7
    repeats: int = 5
    zero_stage: int = 1
    small: bool = False
    plain: bool = True


@dataclass(frozen=True)
class Measurement:
    """One implementation at one length. Times in seconds, the median; peak memory in bytes (CUDA only); without room on
    the device only `name` and `sequence` are set.
    """

    name: str
    sequence: int
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    peak_memory: int | None = None
    loss: float | None = None


def draft_config(small: bool) -> DraftConfig:
    """The published draft of MiniMax-M3, or one of a few hundred thousand parameters with the same switches."""
    sizes = (64, 192, 4, 16, 512) if small else (6144, 18432, 64, 128, 200064)
    hidden, intermediate, heads, head_dim, vocabulary = sizes
    return DraftConfig(
        hidden_size=hidden,
        target_hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        draft_vocab_size=vocabulary,
        rope_theta=5e6,
        max_position=1048576,
        rms_norm_eps=1e-6,
        fc_norm=True,
        norm_output=True,
        norm_before_residual=False,
        attention_bias=False,
        taps=(2, 30, 57),
    )


def random_draft(config: DraftConfig, device: torch.device) -> Eagle3Draft:
    """fp32, embedding frozen, as a training run has it."""
    with torch.device(device):
        draft = Eagle3Draft(config)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in draft.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    draft.embed_tokens.requires_grad_(False)
    return draft


def random_features(config: DraftConfig, length: int, steps: int, device: torch.device, dtype: torch.dtype) -> Features:
    """One document of `length` tokens, all supervised."""
    generator = torch.Generator(device).manual_seed(1)

    def states(width: int) -> Tensor:
        return torch.randn(1, length, width, generator=generator, device=device, dtype=dtype)

    ones = np.ones((1, length), np.int32)
    counted = valid_steps(ones, ones, steps).astype(np.int64)
    return Features(
        token_ids=torch.randint(config.vocab_size, (1, length), generator=generator, device=device),
        documents=torch.ones(1, length, dtype=torch.int64, device=device),
        positions=torch.from_numpy(document_positions(ones).astype(np.int64)).to(device),
        valid_steps=torch.from_numpy(counted).to(device),
        aux=states(config.num_aux * config.target_hidden_size),
        final_state=states(config.target_hidden_size),
        packed=False,
    )


def measure_plain(config: DraftConfig, features: Features, settings: Settings, device: torch.device) -> Measurement:
    """Whole optimizer steps of the plain implementation."""
    draft = random_draft(config, device)
    for module in draft.modules():
        # Autocast does not convert their weights: without it norms would miss PyTorch's fused kernel.
        if isinstance(module, torch.nn.RMSNorm | torch.nn.Embedding):
            module.to(features.aux.dtype)
    head = _teacher_head(config, device, features.aux.dtype)
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, **_ADAM, weight_decay=0.0, fused=device.type == "cuda")
    weights = _weights(features, settings.ttt_steps)
    attend = flex_rows if device.type == "cuda" else masked_rows
    kernels, ops.override = ops.override, "reference"

    def step() -> float:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = plain_loss(draft, features, head, weights, attend)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    try:
        return _timed("plain", step, config, features, settings, device)
    finally:
        ops.override = kernels


def measure_ours(config: DraftConfig, features: Features, settings: Settings, device: torch.device) -> Measurement:
    """Whole optimizer steps of the engine that `spec train` uses. Long rows work the layer out twice."""
    dtype = features.aux.dtype
    teacher = Teacher(_teacher_head(config, device, dtype), None)
    asked = _train_config(settings, features.token_ids.shape[1], device.type)
    engine = DraftEngine(random_draft(config, device), teacher, asked, dtype)
    weights = _weights(features, settings.ttt_steps)

    def step() -> float:
        sums = engine.step([features], weights, _ADAM["lr"])
        return float((sums.loss * weights.double()).sum())

    try:
        return _timed("ours", step, config, features, settings, device)
    finally:
        engine.close()


def _train_config(settings: Settings, length: int, device_name: str) -> TrainConfig:
    return parse_config(
        {
            "name": "bench",
            "data": {"path": "random", "sequence_length": length},
            "ttt": {"steps": settings.ttt_steps},
            "schedule": {"steps": 1},
            "loss": {"chunk_elements": 1 << 31},
            "engine": {
                "device": device_name,
                "micro_batch": 1,
                "zero_stage": settings.zero_stage,
                "activation_checkpointing": length > 8192,
            },
        }
    )


def _teacher_head(config: DraftConfig, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device).manual_seed(2)
    shape = (config.vocab_size, config.target_hidden_size)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype) * config.target_hidden_size**-0.5


def _weights(features: Features, steps: int) -> Tensor:
    return step_weights(count_rows(features.valid_steps, steps), 0.8)


def _timed(
    name: str,
    step: Callable[[], float],
    config: DraftConfig,
    features: Features,
    settings: Settings,
    device: torch.device,
) -> Measurement:
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    # Compilation, the optimizer's state and the allocator's blocks come with the first steps.
    loss = step()
    step()
    seconds = []
    for _ in range(settings.repeats):
        started = time.perf_counter()
        # The step returns a number, so it has ended when it returns; nothing is left in the queue but the update.
        step()
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    median, length = sorted(seconds)[len(seconds) // 2], features.token_ids.shape[1]
    rows = count_rows(features.valid_steps, settings.ttt_steps).tolist()
    peak = peak_flops(device)
    flops = step_flops(config, length, length / 2, rows, train_head=True)
    return Measurement(
        name,
        length,
        step_seconds=median,
        tokens_per_second=length / median,
        mfu=None if peak is None else flops / median / peak,
        peak_memory=torch.cuda.max_memory_allocated(device) if cuda else None,
        loss=loss,
    )


def run(settings: Settings, device_name: str, json_path: Path | None) -> list[Measurement]:
    """Measures, prints a table and, last, one JSON line."""
    device, dtype = resolve_device(_train_config(settings, settings.sequence, device_name))
    if device.type == "cpu" and not settings.small:
        raise UserError("at MiniMax-M3's size the draft needs a CUDA device; --small tries the command on a CPU")
    config = draft_config(settings.small)
    results = []
    with processes(device):
        lengths = [settings.sequence, *([settings.long] if settings.long else [])]
        measures = [(measure_ours, "ours", length) for length in lengths]
        measures += [(measure_plain, "plain", settings.sequence)] if settings.plain else []
        for measure, name, length in measures:
            features = random_features(config, length, settings.ttt_steps, device, dtype)
            try:
                results.append(measure(config, features, settings, device))
            except torch.OutOfMemoryError:
                results.append(Measurement(name, length))
            # The next one may take a minute, or end the process.
            print("measured:", *_cells(results[-1]), file=sys.stderr, flush=True)
            del features
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    _print(results, config, settings, device)
    result = {"device": _device_name(device), "torch": torch.__version__, "settings": asdict(settings)}
    result["results"] = [asdict(each) for each in results]
    if json_path is not None:
        write_json(json_path, result)
    print(json.dumps(result))
    return results


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _print(results: list[Measurement], config: DraftConfig, settings: Settings, device: torch.device) -> None:
    console, table = Console(width=120), Table(box=None)
    console.print(
        f"training step of the draft: hidden {config.hidden_size}, vocabulary {config.vocab_size}, "
        f"TTT {settings.ttt_steps}; {_device_name(device)}",
        highlight=False,
    )
    for name in ("", "tokens in a row", "step ms", "tokens/s", "MFU", "peak GiB"):
        table.add_column(name, justify="left" if not name else "right")
    for each in results:
        table.add_row(*_cells(each))
    console.print(table)


def _cells(each: Measurement) -> tuple[str, ...]:
    if each.step_seconds is None:
        return each.name, str(each.sequence), "out of memory", "", "", ""
    return (
        each.name,
        str(each.sequence),
        f"{1000 * each.step_seconds:,.1f}",
        f"{each.tokens_per_second:,.0f}",
        "-" if each.mfu is None else f"{100 * each.mfu:.1f} %",
        "-" if each.peak_memory is None else f"{each.peak_memory / 2**30:.1f}",
    )
