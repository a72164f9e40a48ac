"""Timing on a CUDA device, and what the device can do at best."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Machine:
    """What this device does at best: bytes/s of a large copy (read + written) and FLOP/s of a large bf16 product."""

    name: str
    bandwidth: float
    matmul_rate: float

    def floor(self, moved: float, operations: float) -> float:
        """Microseconds."""
        return 1e6 * max(moved / self.bandwidth, operations / self.matmul_rate)


@dataclass(frozen=True)
class Row:
    """One line of the table. Times in microseconds; `parts` names the pieces of `time`, each timed alone."""

    case: str
    time: float
    floor: float
    moved_bytes: float
    operations: float
    parts: dict[str, float]
    public_best: float | None
    public_dense: float | None


class Timer:
    """Median time of a function on the device, L2 cold."""

    def __init__(self) -> None:
        self.flush = torch.zeros(64 << 20, device="cuda")
        self.sink = torch.zeros((), device="cuda")

    def __call__(self, run: Callable[[], object], *, graph: bool = False, repeats: int = 30) -> float:
        """Microseconds."""
        run()
        torch.cuda.synchronize()
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                run()
            run = captured.replay
        for _ in range(2):
            run()
        pairs = []
        for _ in range(repeats):
            torch.sum(
                self.flush, 0, out=self.sink
            )  # read, not written: dirty lines would be written back in the timed part
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return 1e3 * statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def measure_machine(timer: Timer) -> Machine:
    """Copy bandwidth and matmul rate, on random data."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    copy = timer(lambda: target.copy_(source), repeats=10)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = timer(lambda: a @ b, repeats=10)
    return Machine(torch.cuda.get_device_name(), 2 * (4 << 30) / (copy * 1e-6), 2 * 8192**3 / (product * 1e-6))
