"""Rows and learning rate of an optimizer step: functions of its number alone, so a resumed run continues exactly."""

import math

import numpy as np

from target_model.errors import UserError
from train.config import EngineConfig, ScheduleConfig


def share_batch(engine: EngineConfig, began_with: int, world: int) -> EngineConfig:
    """Settings for `world` processes of a run that began with another number: every optimizer step has the same rows.

    The micro batch stays if it can, or shrinks; accumulation follows. UserError if the rows cannot be shared evenly.
    """
    rows = engine.micro_batch * engine.accumulate * began_with
    if rows % world:
        raise UserError(
            f"this run began with {began_with} processes and has {rows} rows in a step, which {world} cannot share"
        )
    mine = rows // world
    micro = max(size for size in range(1, engine.micro_batch + 1) if mine % size == 0)
    return engine.model_copy(update={"micro_batch": micro, "accumulate": mine // micro})


def learning_rate(step: int, total: int, peak: float, schedule: ScheduleConfig) -> float:
    """Linear warm-up, then a cosine to `final` * peak. `step` counts from 0."""
    warmup = math.ceil(schedule.warmup * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return peak * (schedule.final + (1 - schedule.final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def total_steps(schedule: ScheduleConfig, rows: int, tokens: int, global_batch: int) -> int:
    """Optimizer steps of the run over `rows` training rows that hold `tokens` tokens."""
    if schedule.steps is not None:
        return schedule.steps
    if schedule.epochs is not None:
        return max(1, round(schedule.epochs * rows / global_batch))
    return max(1, round(schedule.tokens * rows / tokens / global_batch))


class DataOrder:
    """An endless stream of row numbers: a fresh permutation each epoch, batches running on across their borders."""

    def __init__(self, rows: int, global_batch: int, seed: int):
        self.rows, self.global_batch, self.seed = rows, global_batch, seed
        self._permutations: dict[int, np.ndarray] = {}

    def batch(self, step: int) -> np.ndarray:
        """The rows of optimizer step `step`, counted from 0: int64 [global_batch]."""
        index = np.arange(step * self.global_batch, (step + 1) * self.global_batch)
        epochs, offsets = index // self.rows, index % self.rows
        self._permutations = {int(epoch): self._permutation(int(epoch)) for epoch in np.unique(epochs)}
        return np.array([self._permutations[int(epoch)][offset] for epoch, offset in zip(epochs, offsets, strict=True)])

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch in self._permutations:
            return self._permutations[epoch]
        return np.random.default_rng([self.seed, 2, epoch]).permutation(self.rows)
