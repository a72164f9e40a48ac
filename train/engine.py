"""The DeepSpeed engine that owns the draft: ZeRO, bf16 with fp32 masters, accumulation, clipping, checkpoints.

The only file that imports deepspeed. No extension is built: AdamW is torch's, and the shared-memory collective is
switched off.
"""

import argparse
import contextlib
import copy
import gc
import io
import logging
import os
import shutil
import socket
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

# DeepSpeed imports it later, and default arguments in there keep the process group of that moment for ever.
import torch.distributed.nn.functional  # noqa: F401

if not torch.cuda.is_available():
    # Read when deepspeed is imported: without it a machine without a GPU is warned about.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.accelerator import set_accelerator
from deepspeed.checkpoint import ds_to_universal
from torch import Tensor, nn

from draft_model.model import Eagle3Draft
from target_model.errors import UserError
from train.checkpoints import PARTIAL, checkpoint_path, checkpoints
from train.config import TrainConfig
from train.features import Features
from train.finite import FiniteAdamW
from train.loss import LossSettings, StepSums, Teacher, ttt_loss
from train.ttt import unroll, valid_rows


class DraftStep(nn.Module):
    """Features in, loss and metric sums out: the module that DeepSpeed wraps."""

    def __init__(self, draft: Eagle3Draft, config: TrainConfig):
        super().__init__()
        self.draft = draft
        self.steps, self.attention = config.ttt.steps, config.ttt.attention
        self.settings = LossSettings(config.loss.kind, config.loss.eta, config.loss.chunk_elements)
        self.recompute = config.engine.activation_checkpointing
        self._unroll = torch.compile(unroll) if config.engine.compile else unroll

    def forward(self, features: Features, teacher: Teacher, weights: Tensor) -> tuple[Tensor, StepSums]:
        rows = valid_rows(features.valid_steps, self.steps)
        states = self._unroll(self.draft, features, rows, self.attention, self.recompute)
        final, valid = features.final_state, features.valid_steps
        return ttt_loss(states, rows, self.draft.lm_head.weight, final, valid, weights, teacher, self.settings)


def resolve_device(config: TrainConfig) -> tuple[torch.device, torch.dtype]:
    """The device and the compute dtype of this process."""
    cuda = torch.cuda.is_available()
    if config.engine.device == "cuda" and not cuda:
        raise UserError("engine.device is cuda, but this machine has no CUDA device")
    kind = config.engine.device if config.engine.device != "auto" else ("cuda" if cuda else "cpu")
    dtype = config.engine.dtype if config.engine.dtype != "auto" else ("bfloat16" if kind == "cuda" else "float32")
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # cuDNN's attention plans every new shape anew, about 10 ms each: packed rows bring new shapes all the time.
        torch.backends.cuda.enable_cudnn_sdp(False)
        return torch.device("cuda", torch.cuda.current_device()), getattr(torch, dtype)
    return torch.device(kind), getattr(torch, dtype)


@contextlib.contextmanager
def processes(device: torch.device) -> Iterator[tuple[int, int]]:
    """(rank, world size) of this process among those that a launcher started; without a launcher a world of one.

    At the end all wait for each other, and the process groups are taken down with their threads. Otherwise a worker of
    gloo may still hold tensors of the last collective when the interpreter goes: it asks for the interpreter's lock to
    release them, and a process in that state aborts ("terminate called without an active exception"). After an error
    nobody is waited for: the launcher ends the others. NCCL's groups then go with the process, as they are only taken
    down by all ranks together, and the others may wait in a collective for this one.
    """
    alone = {} if "RANK" in os.environ else _world_of_one()
    os.environ.update(alone)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device.type == "cpu":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        set_accelerator(CPU_Accelerator())
        # DeepSpeed looks up here which extensions it may compile, which takes minutes and a compiler: none. gloo and
        # torch do their work. Assigned whole, as reading it would first try out a compiler on each of them.
        vars(deepspeed.ops)["__compatible_ops__"] = defaultdict(bool)
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", verbose=False)
    # `resolve_device` has set the device of this process. DeepSpeed tells torch of it only where there are several.
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
    # DeepSpeed's collectives under older names, in every step of ZeRO 3.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    leaves = device.type == "cpu" or world == 1
    try:
        yield rank, world
        torch.distributed.barrier()
        leaves = True
    finally:
        if leaves:
            deepspeed.comm.destroy_process_group()
        # A group's threads end with its last reference, and some lie in cycles of DeepSpeed's engine.
        gc.collect()
        for name in alone:
            del os.environ[name]


def _world_of_one() -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def deepspeed_json(config: TrainConfig, dtype: torch.dtype) -> dict[str, Any]:
    """DeepSpeed's configuration, derived from ours; `engine.deepspeed` has the last word."""
    engine = config.engine
    zero: dict[str, Any] = {"stage": engine.zero_stage}
    if engine.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if engine.offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    derived = {
        "train_micro_batch_size_per_gpu": engine.micro_batch,
        "gradient_accumulation_steps": engine.accumulate,
        "gradient_clipping": config.optimizer.clip,
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's own CPU Adam would have to be compiled, and would not skip updates that are not finite.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 40,
    }
    return _overlaid(derived, engine.deepspeed)


def _overlaid(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`values` with `changes`, sections merged."""
    merged = dict(values)
    for key, change in changes.items():
        section = values.get(key)
        merged[key] = _overlaid(section, change) if isinstance(section, dict) and isinstance(change, dict) else change
    return merged


class DraftEngine:
    """One optimizer step at a time over micro batches of `Features`."""

    def __init__(self, draft: Eagle3Draft, teacher: Teacher, config: TrainConfig, dtype: torch.dtype):
        module = DraftStep(draft, config)
        trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
        self.optimizer = FiniteAdamW(
            trained,
            lr=config.optimizer.lr,
            betas=tuple(config.optimizer.betas),
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
            # One pass over weights and moments instead of ten; also where they are offloaded to the host.
            fused=trained[0].is_cuda,
        )
        self.draft_config, self.dtype, self.teacher = draft.config, dtype, teacher
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=self.optimizer, model_parameters=trained, config=deepspeed_json(config, dtype)
        )
        # DeepSpeed averages over micro batches and ranks; our row weights are already those of the whole step.
        self._undo_average = self.engine.gradient_accumulation_steps() * self.engine.world_size

    def step(self, micro_batches: list[Features], weights: Tensor, rate: float) -> StepSums | None:
        """Forward and backward over the micro batches of one optimizer step, then the update. Sums are this rank's.

        None, on all ranks together, if a loss or gradient of any of them was not finite: then nothing is updated.
        """
        self.optimizer.start_step()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        total: StepSums | None = None
        for features in micro_batches:
            loss, sums = self.engine(features, self.teacher, weights)
            self.optimizer.watch(loss)
            self.engine.backward(loss * self._undo_average)
            self.engine.step()
            total = sums if total is None else total + sums
        return total if self.optimizer.updated else None

    def grad_norm(self) -> float | None:
        """Gradient norm of the last step before clipping; None where DeepSpeed does not keep it (fp32 at ZeRO 0), and
        after a skipped step.
        """
        norm = self.engine.get_global_grad_norm()
        return float(norm) if norm is not None and self.optimizer.updated else None

    def export(self) -> Eagle3Draft:
        """A frozen copy of the draft on this device, in the compute dtype. All ranks call it together."""
        draft = self.engine.module.draft
        parameters = list(draft.parameters())
        copied = Eagle3Draft(self.draft_config).to(parameters[0].device, self.dtype)
        with deepspeed.zero.GatheredParameters(parameters, enabled=self.engine.zero_optimization_stage() == 3):
            copied.load_state_dict(draft.state_dict())
        return copied.eval().requires_grad_(False)

    def save(self, directory: Path, step: int, state: dict[str, Any]) -> Path:
        """Writes `directory`/step-N: weights (frozen ones too), optimizer, `state`. It appears whole or not at all."""
        final = checkpoint_path(directory, step)
        partial = directory / (final.name + PARTIAL)
        try:
            self.engine.save_checkpoint(
                str(directory), tag=partial.name, client_state=copy.deepcopy(state), save_latest=False
            )
        except (OSError, RuntimeError) as error:
            raise UserError(f"checkpoint {final} could not be written: {error}") from None
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            partial.rename(final)
        torch.distributed.barrier()
        return final

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Continues from a saved step; returns the state it was saved with. Other ranks may have saved it: then their
        parts are put together first, as DeepSpeed's universal checkpoint, and dealt out anew. UserError that names the
        file if one of the checkpoint's is damaged.
        """
        sharded, parts = self.engine.zero_optimization_stage() > 0, len(list(checkpoint.glob("*_optim_states.pt")))
        if not any(checkpoint.glob("*_model_states.pt")) or (sharded and not parts):
            raise UserError(f"checkpoint {checkpoint} lacks files: {_way_on(checkpoint)}")
        whole = sharded and parts != torch.distributed.get_world_size()
        # Settable only here: whether it is needed depends on what is found on disk.
        self.engine._config.load_universal_checkpoint = whole
        try:
            source = _universal(checkpoint) if whole else checkpoint
            _, state = self.engine.load_checkpoint(str(source.parent), tag=source.name)
        except Exception:
            # Which errors a damaged file brings is nobody's promise; a fault of another kind keeps its own.
            damaged = next((file for file in sorted(checkpoint.glob("*.pt")) if not _is_whole(file)), None)
            if damaged is None:
                raise
            raise UserError(f"{damaged} is damaged: {_way_on(checkpoint)}") from None
        if whole:
            torch.distributed.barrier()
            if torch.distributed.get_rank() == 0:
                shutil.rmtree(source)
                source.with_name("latest_universal").unlink()
        if self.teacher.kept_ids is not None:
            # The draft's vocabulary is now the checkpoint's, whatever the fresh draft chose: its teacher follows.
            places = torch.arange(len(self.teacher.kept_ids), device=self.teacher.kept_ids.device)
            self.teacher = replace(self.teacher, kept_ids=self.engine.module.draft.target_ids(places))
        return state

    def close(self) -> None:
        self.engine.destroy()


def _is_whole(file: Path) -> bool:
    """Whether what torch saved, a zip archive, agrees with its checksums."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError):
        return False


def _way_on(checkpoint: Path) -> str:
    earlier = [path.name for path in checkpoints(checkpoint.parent) if path < checkpoint]
    place = earlier[-1] if earlier else "the start, as there is no earlier one"
    return f"delete {checkpoint} to go on from {place}, or set resume=false to replace the run"


def _universal(checkpoint: Path) -> Path:
    """A checkpoint's parts put together, in a directory beside it that is for this moment only."""
    merged = checkpoint.with_name(f"{checkpoint.name}.universal{PARTIAL}")
    if torch.distributed.get_rank() == 0:
        settings = argparse.Namespace(
            input_folder=str(checkpoint),
            output_folder=str(merged),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            ds_to_universal.main(settings)
    torch.distributed.barrier()
    return merged
