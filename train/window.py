"""Sums of the steps between two log lines, over all ranks."""

import time

import torch

from train.loss import StepSums


class LogWindow:
    """Sums since the last log line."""

    def __init__(self) -> None:
        self.sums: StepSums | None = None
        self.tokens, self.steps = 0, 0
        self.started = time.perf_counter()

    def add(self, sums: StepSums | None, tokens: int) -> None:
        if sums is not None:
            self.sums = sums if self.sums is None else self.sums + sums
        self.tokens += tokens
        self.steps += 1


def reduce_sums(sums: StepSums, world: int) -> StepSums:
    """The sums of all `world` ranks, which call this together."""
    if world == 1:
        return sums
    stacked = torch.stack(sums.tensors())
    torch.distributed.all_reduce(stacked)
    return StepSums(*stacked)
