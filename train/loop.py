"""The training loop: capture, step, log, judge, save."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draft_model.checkpoint import load_draft
from draft_model.model import Eagle3Draft
from draft_model.resolve import resolve_draft
from target_model.checkpoint import load_target
from target_model.errors import UserError
from target_model.model import TargetModel
from target_model.resolve import ResolvedTarget, known_targets, resolve_target
from target_model.tokenizer import load_tokenizer
from train.capture import run_taps
from train.config import TrainConfig
from train.data import TrainingRows, load_rows
from train.ends import load_ends
from train.engine import DraftEngine, processes, resolve_device
from train.features import OnlineCapture
from train.initialise import new_draft, set_trainable
from train.loss import StepSums, Teacher, count_rows, step_weights
from train.plan import state_bytes
from train.progress import ProgressDisplay
from train.regression import start_from_regression
from train.run import RunFolder
from train.schedule import DataOrder, learning_rate, share_batch, total_steps
from train.store import FeatureStore, identity
from train.window import LogWindow, reduce_sums

Judge = Callable[[Eagle3Draft], dict[str, Any]]


@dataclass(frozen=True)
class TrainResult:
    """Where the run lies, how far it got, and its best judgement (None without a judge)."""

    directory: Path
    draft: Path
    step: int
    best: dict[str, Any] | None
    metrics: dict[str, Any]


def train(
    config: TrainConfig, *, judge: Judge | None = None, progress: bool = True, stop_after: int | None = None
) -> TrainResult:
    """Runs or continues a training run.

    `judge` gets a frozen copy of the draft, at the precision of its export, and returns measurements with the key "al",
    by which the best checkpoint is chosen; without a judge the last one is exported. `stop_after` ends after that step,
    as an interruption would.
    """
    if config.engine.threads is not None:
        torch.set_num_threads(config.engine.threads)
    # The target first: without it nothing else matters, and its message says what it would take.
    resolved = resolve_target(config.target)
    device, dtype = resolve_device(config)
    with processes(device) as (rank, world), ProgressDisplay(config, enabled=progress and rank == 0) as display:
        return _train(config, resolved, device, dtype, rank, world, judge, display, stop_after)


def _train(
    config: TrainConfig,
    resolved: ResolvedTarget,
    device: torch.device,
    dtype: torch.dtype,
    rank: int,
    world: int,
    judge: Judge | None,
    display: ProgressDisplay,
    stop_after: int | None,
) -> TrainResult:
    """The part of a run that needs its processes; whatever refers to them is gone when it returns."""
    tokenizer = load_tokenizer(resolved.path)
    display.stage("reading data")
    store = None if config.features.store is None else FeatureStore(config.features.store)
    if store is not None:
        wanted = identity(resolved, tokenizer, run_taps(config, resolved), config.data)
        store.prepare(wanted, config.ttt.steps, device, dtype)
    rows = load_rows(config.data, tokenizer, config.seed) if store is None else store.rows
    display.note(rows.summary())
    display.stage("loading target")
    if store is None:
        target = load_target(config.target, dtype=dtype, device=device)
    else:
        target = load_ends(resolved, dtype=dtype, device=device)
    run = _Run(config, target, rows, store, rank, world, dtype)
    try:
        return run.execute(judge, display, stop_after)
    finally:
        run.engine.close()


class _Run:
    """State of a run in this process."""

    def __init__(
        self,
        config: TrainConfig,
        target: TargetModel,
        rows: TrainingRows,
        store: FeatureStore | None,
        rank: int,
        world: int,
        dtype: torch.dtype,
    ):
        self.rank, self.world = rank, world
        self.folder = RunFolder(config, _target_identity(config.target))
        began_with = _from_rank_zero(self.folder.began_with(world) if rank == 0 else None)
        config = config.model_copy(update={"engine": share_batch(config.engine, began_with, world)})
        self.config = config
        self.device, self.dtype = target.device, dtype
        self.per_rank = config.engine.micro_batch * config.engine.accumulate
        self.total = total_steps(config.schedule, len(rows), rows.tokens, self.per_rank * world)
        self.order = DataOrder(len(rows), self.per_rank * world, config.seed)
        draft = self._initial_draft(target, rows)
        self.capture = store or OnlineCapture(
            target,
            rows,
            draft.config.taps,
            config.ttt.steps,
            capture_rows=config.features.capture_rows,
            cache=config.features.cache,
        )
        kept = draft.target_ids(torch.arange(draft.config.draft_vocab_size, device=self.device))
        teacher = Teacher(target.lm_head.weight, kept if draft.config.pruned else None)
        self.row_tokens = (rows.documents > 0).sum(-1)
        _check_disk(config, draft)
        self.checkpoint = self.folder.prepare(self.total) if rank == 0 else None
        self.checkpoint = _from_rank_zero(self.checkpoint)
        if self.checkpoint is None and config.draft.initialisation == "regression":
            self._regression(draft, target, teacher)
        self.engine = DraftEngine(draft, teacher, config, dtype)
        self.best: dict[str, Any] | None = None
        self.tokens = 0
        # Optimizer steps left out because something was not finite: in all, and since the last good one.
        self.skipped = self.skipped_in_a_row = 0

    def _initial_draft(self, target: TargetModel, rows: TrainingRows) -> Eagle3Draft:
        settings = self.config.draft
        if settings.init_from is None:
            draft = new_draft(settings, target, rows, self.config.seed)
        else:
            chosen = resolve_draft(settings.init_from, resolve_target(self.config.target))
            draft = load_draft(chosen.path, torch.float32, self.device, chosen.default_taps)
        set_trainable(draft, settings)
        return draft.train()

    def _regression(self, draft: Eagle3Draft, target: TargetModel, teacher: Teacher) -> None:
        size, wanted = self.config.features.capture_rows, self.config.draft.regression_tokens
        rows = np.random.default_rng([self.config.seed, 3]).permutation(self.order.rows)
        rows = rows[: 1 + int(np.searchsorted(self.row_tokens[rows].cumsum(), wanted))]
        batches = [self.capture.features(rows[i : i + size]) for i in range(0, len(rows), size)]
        start_from_regression(draft, target, teacher, batches, self.config.seed)

    def execute(self, judge: Judge | None, display: ProgressDisplay, stop_after: int | None) -> TrainResult:
        step = self._resume()
        if self.rank == 0 and step == 0:
            self.folder.write_record(step=0, total_steps=self.total, best=None)
        end = self.total if stop_after is None else min(self.total, stop_after)
        tracker = _tracker(self.config, self.rank)
        window, metrics = LogWindow(), {}
        display.start(step, self.total)
        while step < end:
            sums, tokens = self._step(step)
            step += 1
            self.tokens += tokens
            self._count_skipped(step, sums)
            window.add(sums, tokens)
            if step % self.config.log.every == 0 or step == end:
                metrics = self._log(step, window, tracker)
                window = LogWindow()
            display.advance(step, metrics, self.tokens)
            if self._due(step, self.config.eval.every, end == self.total):
                self._judge(step, judge, display, tracker)
            if self._due(step, self.config.checkpoint.every, True) or step == end:
                self._save(step)
        if tracker is not None:
            tracker.finish()
        return TrainResult(self.folder.path, self.folder.draft, step, self.best, metrics)

    def _due(self, step: int, every: int | None, at_end: bool) -> bool:
        return (every is not None and step % every == 0) or (at_end and step == self.total)

    def _resume(self) -> int:
        if self.checkpoint is None:
            return 0
        state = self.engine.load(self.checkpoint)
        self.best, self.tokens = state["best"], state["tokens"]
        self.skipped, self.skipped_in_a_row = state["skipped"], state["skipped_in_a_row"]
        if self.rank == 0:
            self.folder.cut_log(state["step"])
        return state["step"]

    def _count_skipped(self, step: int, sums: StepSums | None) -> None:
        """A bad batch is left out; many in a row mean that the run itself has gone wrong."""
        self.skipped += sums is None
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if sums is None else 0
        if self.skipped_in_a_row >= self.config.optimizer.skip_limit:
            raise UserError(
                f"loss or gradient is not finite at step {step}: lower optimizer.lr (now {self.config.optimizer.lr}); "
                f"{self.skipped_in_a_row} steps in a row were skipped"
            )

    def _step(self, step: int) -> tuple[StepSums | None, int]:
        """One optimizer step, None if it was skipped as not finite; the tokens are those of all ranks."""
        batch = self.order.batch(step)
        steps = self.config.ttt.steps
        # Every rank knows the whole step's rows, so the normalisers need no communication.
        counts = count_rows(torch.from_numpy(self.capture.valid_steps[batch].astype(np.int64)), steps)
        weights = step_weights(counts, self.config.ttt.decay).to(self.device)
        mine = batch[self.rank :: self.world]
        size = self.config.engine.micro_batch
        micro = [self.capture.features(mine[i : i + size]) for i in range(0, len(mine), size)]
        total = self.config.schedule, self.config.optimizer.lr
        sums = self.engine.step(micro, weights, learning_rate(step, self.total, total[1], total[0]))
        return sums, int(self.row_tokens[batch].sum())

    def _log(self, step: int, window: "LogWindow", tracker) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        if window.sums is not None:
            sums = reduce_sums(window.sums, self.world)
            metrics = sums.metrics()
            metrics["loss"] = float((sums.loss * step_weights(sums.rows, self.config.ttt.decay).double()).sum())
        metrics |= {
            "step": step,
            "skipped": self.skipped,
            "lr": learning_rate(step - 1, self.total, self.config.optimizer.lr, self.config.schedule),
            "grad_norm": self.engine.grad_norm(),
            "tokens": self.tokens,
            "tokens_per_second": window.tokens / max(1e-9, time.perf_counter() - window.started),
            "cpu_seconds": time.process_time(),
        }
        if self.rank == 0:
            self.folder.log(metrics)
            if tracker is not None:
                tracker.log(metrics)
        return metrics

    def _judge(self, step: int, judge: Judge | None, display: ProgressDisplay, tracker) -> None:
        """Exports the draft if it is the best so far; without a judge the newest one is."""
        draft = self.engine.export()
        if self.rank == 0:
            # What is judged is what will be loaded: rounded to the export's precision.
            draft = draft.to(self.folder.export_dtype).to(self.dtype)
            result = None
            if judge is not None:
                display.stage("judging")
                result = {**judge(draft), "step": step}
                self.folder.log({"step": step, "judge": result})
                if tracker is not None:
                    tracker.log(
                        {f"judge/{key}": value for key, value in result.items() if isinstance(value, int | float)}
                    )
                display.note(f"step {step}: AL {result['al']:.3f}")
            if result is None or self.best is None or result["al"] > self.best["al"]:
                self.best = result
                self.folder.export(draft, {"config": self.config.model_dump(), "step": step, "judge": result})
        self.best = _from_rank_zero(self.best)

    def _save(self, step: int) -> None:
        state = {
            "step": step,
            "tokens": self.tokens,
            "best": self.best,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }
        if not (self.folder.state / f"step-{step:08d}").exists():
            self.engine.save(self.folder.state, step, state)
        if self.rank == 0:
            self.folder.write_record(step=step, total_steps=self.total, best=self.best)
            self.folder.prune()


def _from_rank_zero(value: Any) -> Any:
    box = [value]
    torch.distributed.broadcast_object_list(box)
    return box[0]


def _tracker(config: TrainConfig, rank: int):
    if config.log.wandb == "disabled" or rank != 0:
        return None
    from train.tracking import WandbTracker

    return WandbTracker(config)


def _target_identity(name: str) -> str:
    path = Path(name).expanduser()
    return str(path.resolve()) if name not in known_targets() and path.is_dir() else name.removeprefix("MiniMaxAI/")


def _check_disk(config: TrainConfig, draft: Eagle3Draft) -> None:
    """Refuses to start a run whose checkpoints will not fit."""
    place = next(
        path for path in [config.run_directory.absolute(), *config.run_directory.absolute().parents] if path.exists()
    )
    needed = state_bytes(draft) * (config.checkpoint.keep + 1)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UserError(f"{place} has {free / 1e9:.2f} GB free, but checkpoints of this run need {needed / 1e9:.2f} GB")
