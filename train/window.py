"""Sums of the steps between two log lines, of one rank."""

import time

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
