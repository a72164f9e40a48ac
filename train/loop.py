"""The training loop: capture, step, log, judge, save."""

import contextlib
import os
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
from target_model.errors import UserError
from target_model.model import TargetModel
from target_model.resolve import ResolvedTarget, resolve_target
from train.checkpoints import checkpoint_path
from train.config import TrainConfig
from train.data import TrainingRows
from train.engine import DraftEngine, processes, resolve_device
from train.flops import peak_flops, step_flops
from train.initialise import new_draft, set_trainable
from train.journal import Journal, simulated_length
from train.lock import locked
from train.loss import StepSums, Teacher, count_rows, step_weights
from train.origin import Origin, open_origin
from train.plan import state_bytes
from train.progress import ProgressDisplay
from train.ranks import any_rank, from_rank_zero, reduce_sums
from train.regression import start_from_regression
from train.replay import read_answers, replayed_acceptance
from train.run import RunFolder
from train.schedule import DataOrder, learning_rate, share_batch, total_steps
from train.window import LogWindow

# Gets a frozen draft and the run's target, None where the run has none (features from a store).
Judge = Callable[[Eagle3Draft, TargetModel | None], dict[str, Any]]
# Gets the step to go on from, then every finished one, and says whether the run has to stop there.
Stop = Callable[[int], bool]


@dataclass(frozen=True)
class TrainResult:
    """Where the run lies, how far it got, if it was stopped there, and its best judgement (None without a judge)."""

    directory: Path
    draft: Path
    step: int
    stopped: bool
    best: dict[str, Any] | None
    metrics: dict[str, Any]


def train(
    config: TrainConfig,
    *,
    judge: Judge | None = None,
    progress: bool = True,
    stop: Stop | None = None,
) -> TrainResult:
    """Runs or continues a training run.

    `judge` gets a frozen copy of the draft, at the precision of its export, and the target, and returns measurements
    with the key "al", by which the best checkpoint is chosen; without a judge the last one is exported. Where `stop`
    says so in any process, all of them end with a checkpoint of that step.
    """
    if config.engine.threads is not None:
        torch.set_num_threads(config.engine.threads)
    # The target first: without it nothing else matters, and its message says what it would take.
    resolved = resolve_target(config.target)
    device, dtype = resolve_device(config)
    with contextlib.ExitStack() as held:
        if os.environ.get("RANK", "0") == "0":
            held.enter_context(locked(config.run_directory))
        rank, world = held.enter_context(processes(device))
        display = held.enter_context(ProgressDisplay(config, enabled=progress and rank == 0))
        return _train(config, resolved, device, dtype, rank, world, judge, display, stop)


def _train(
    config: TrainConfig,
    resolved: ResolvedTarget,
    device: torch.device,
    dtype: torch.dtype,
    rank: int,
    world: int,
    judge: Judge | None,
    display: ProgressDisplay,
    stop: Stop | None,
) -> TrainResult:
    """The part of a run that needs its processes; whatever refers to them is gone when it returns."""
    origin = open_origin(config, resolved, rank, world, device, dtype, display)
    run = _Run(config, origin, rank, world, dtype)
    try:
        return run.execute(judge, display, stop)
    finally:
        run.engine.close()


class _Run:
    """State of a run in this process."""

    def __init__(self, config: TrainConfig, origin: Origin, rank: int, world: int, dtype: torch.dtype):
        self.rank, self.world = rank, world
        self.folder = RunFolder(config)
        began_with = from_rank_zero(self.folder.began_with(world) if rank == 0 else None)
        config = config.model_copy(update={"engine": share_batch(config.engine, began_with, world)})
        rows, target = origin.rows, origin.ends
        self.config = config
        self.device, self.dtype = target.device, dtype
        self.target, self.capture = origin.target, origin.capture
        self.eos_token_ids = target.config.eos_token_ids
        self.answers = [] if config.eval.answers is None else read_answers(config.eval.answers)
        self.per_rank = config.engine.micro_batch * config.engine.accumulate
        self.total = total_steps(config.schedule, len(rows), rows.tokens, self.per_rank * world)
        self.order = DataOrder(len(rows), self.per_rank * world, config.seed)
        draft = self._initial_draft(target, rows)
        kept = draft.target_ids(torch.arange(draft.config.draft_vocab_size, device=self.device))
        teacher = Teacher(target.lm_head.weight, kept if draft.config.pruned else None)
        self.row_tokens = (rows.documents > 0).sum(-1)
        self.checkpoint_bytes = state_bytes(draft)
        # The last ones, the best one, and the one that is being written.
        self.folder.check_disk(config.checkpoint.keep + 2, self.checkpoint_bytes)
        self.checkpoint = self.folder.prepare(self.total) if rank == 0 else None
        self.checkpoint = from_rank_zero(self.checkpoint)
        if self.checkpoint is None and config.draft.init_from is None and config.draft.initialisation == "regression":
            self._regression(draft, target, teacher)
        self.engine = DraftEngine(draft, teacher, config, dtype)
        self.best: dict[str, Any] | None = None
        # Judgements since the best one.
        self.stale = 0
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

    def execute(self, judge: Judge | None, display: ProgressDisplay, stop: Stop | None) -> TrainResult:
        step = self._resume()
        if self.rank == 0 and step == 0:
            self.folder.write_record(step=0, total_steps=self.total, best=None)
        journal = Journal(self.config, self.folder, display) if self.rank == 0 else None
        window, metrics = LogWindow(), {}
        display.start(step, self.total)
        stopped = self._asked_to(stop, step)
        while step < self.total and not self._impatient() and not stopped:
            sums, tokens = self._step(step)
            step += 1
            self.tokens += tokens
            self._count_skipped(step, sums)
            window.add(sums, tokens)
            stopped = self._asked_to(stop, step)
            if self._due(step, self.config.log.every) or stopped:
                metrics = self._metrics(step, window)
                if journal is not None:
                    journal.metrics(metrics)
                window = LogWindow()
            display.advance(step, metrics, self.tokens)
            if self._due(step, self.config.eval.every):
                display.stage("judging")
                self._judge(step, judge, metrics, journal)
                stopped = stopped or self._asked_to(stop, step)
            best_now = self.best is not None and self.best["step"] == step
            if self._due(step, self.config.checkpoint.every) or stopped or best_now or self._impatient():
                self._save(step)
        if journal is not None:
            if self._impatient():
                journal.note(f"ended at step {step}: {self.stale} judgements without a better AL")
            journal.finish()
        return TrainResult(self.folder.path, self.folder.draft, step, stopped, self.best, metrics)

    def _asked_to(self, stop: Stop | None, step: int) -> bool:
        """Whether any process is asked to stop at this step, which is not the last one."""
        return stop is not None and any_rank(stop(step) and step < self.total, self.device)

    def _impatient(self) -> bool:
        """Whether so many judgements brought no better draft that the run ends."""
        return self.config.eval.patience is not None and self.stale >= self.config.eval.patience

    def _due(self, step: int, every: int | None) -> bool:
        return (every is not None and step % every == 0) or step == self.total

    def _resume(self) -> int:
        if self.checkpoint is None:
            if self.rank == 0:
                self.folder.cut_log(0)
            return 0
        state = self.engine.load(self.checkpoint)
        self.best, self.stale, self.tokens = state["best"], state["stale"], state["tokens"]
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
        size = self.config.engine.micro_batch
        shares = [batch[rank :: self.world] for rank in range(self.world)]
        parts = [[share[i : i + size] for i in range(0, len(share), size)] for share in shares]
        micro = self.capture.micro_batches(parts, self.rank)
        return self.engine.step(micro, weights, self._rate(step)), int(self.row_tokens[batch].sum())

    def _rate(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0."""
        return learning_rate(step, self.total, self.config.optimizer.lr, self.config.schedule)

    def _metrics(self, step: int, window: LogWindow) -> dict[str, Any]:
        """The log line of the steps in the window. All ranks call it together."""
        seconds = max(1e-9, time.perf_counter() - window.started)
        metrics: dict[str, Any] = {}
        if window.sums is not None:
            sums = reduce_sums(window.sums)
            metrics = sums.metrics()
            metrics["loss"] = float((sums.loss * step_weights(sums.rows, self.config.ttt.decay).double()).sum())
            peak = peak_flops(self.device)
            if peak is not None:
                # A token sees half of its row on average.
                visible = window.tokens / window.steps / (self.per_rank * self.world) / 2
                trained = self.config.draft.train_head
                flops = step_flops(self.engine.draft_config, window.tokens, visible, metrics["rows"], trained)
                metrics["mfu"] = flops / seconds / (peak * self.world)
        if self.device.type == "cuda":
            metrics["gpu_memory"] = torch.cuda.max_memory_allocated(self.device)
        return metrics | {
            "step": step,
            "skipped": self.skipped,
            "lr": self._rate(step - 1),
            "grad_norm": self.engine.grad_norm(),
            "tokens": self.tokens,
            "tokens_per_second": window.tokens / seconds,
            "cpu_seconds": time.process_time(),
        }

    def _judge(self, step: int, judge: Judge | None, metrics: dict[str, Any], journal: Journal | None) -> None:
        """Exports the draft if it is the best so far; without a judge the newest one is. All ranks call it together."""
        # What is judged is what will be loaded: rounded to the export's precision.
        draft = self.engine.export().to(self.folder.export_dtype).to(self.dtype)
        result = None
        if self.config.eval.judge == "replay":
            result = replayed_acceptance(draft, self.capture.text, self.eos_token_ids, self.answers)
        elif self.config.eval.judge == "served" and judge is not None and journal is not None:
            result = judge(draft, self.target)
        if journal is not None:
            if result is not None:
                result = {**result, "step": step}
                if "chain" in result and "step_accuracy" in metrics:
                    result["tau_sim"] = simulated_length(metrics["step_accuracy"], result["chain"])
                journal.judgement(step, result)
            self.stale += 1
            if result is None or self.best is None or result["al"] > self.best["al"]:
                self.best, self.stale = result, 0
                self.folder.export(draft, {"config": self.config.model_dump(), "step": step, "judge": result})
        self.best, self.stale = from_rank_zero((self.best, self.stale))

    def _save(self, step: int) -> None:
        state = {
            "step": step,
            "tokens": self.tokens,
            "best": self.best,
            "stale": self.stale,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }
        if not checkpoint_path(self.folder.state, step).exists():
            self.folder.check_disk(1, self.checkpoint_bytes)
            self.engine.save(self.folder.state, step, state)
        if self.rank == 0:
            ended = self._impatient()
            self.folder.write_record(step=step, total_steps=self.total, best=self.best, ended=ended)
            self.folder.prune(None if self.best is None else self.best["step"])
