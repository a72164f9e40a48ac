"""Decode steps of an engine, timed: wall, its parts, and what of it the kernels take."""

import gc
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from serve.engine import Engine
from serve.request import Request, SamplingParams

# A step of any accepted length should have come by then: what is compiled or captured at first sight is not timed.
WARM_UP, PROFILED = 24, 6


@dataclass(frozen=True)
class StepTimes:
    """Means over timed steps. length: tokens that a sequence gained in one. Seconds of a step: `wall`, and of it what
    the engine counts as drafting and verifying; `kernels`: in which the device ran a kernel or a copy, two at once
    counted once, None where there is no CUDA device; `slowest`: of all steps.
    """

    length: float
    tokens_per_second: float
    wall: float
    draft: float
    verify: float
    kernels: float | None
    slowest: float

    @property
    def other(self) -> float:
        """Scheduling, and whatever else is neither drafting nor verifying."""
        return self.wall - self.draft - self.verify

    @property
    def overhead(self) -> float | None:
        """What the wall takes beyond the kernels, as a share of them."""
        return None if self.kernels is None else self.wall / self.kernels - 1


def tokens_needed(steps: int, depth: int, batch: int) -> int:
    """What a request may gain before and in the timed steps: it is to go on until they are over."""
    return (WARM_UP + steps + PROFILED + 2 * batch + 2) * (depth + 1)


def time_steps(
    engine: Engine, groups: Sequence[Sequence[Sequence[int]]], params: SamplingParams, steps: int
) -> StepTimes:
    """Decodes each group of prompts together: `steps` timed steps after a warm-up, none of which may end a request.
    Prefill is not timed.
    """
    on_cuda = engine.runner.device.type == "cuda"
    walls: list[float] = []
    parts = {"draft_seconds": 0.0, "verify_seconds": 0.0}
    emitted, kernels = 0, None
    for number, group in enumerate(groups):
        names = _start(engine, group, params, number)
        for _ in range(WARM_UP):
            engine.step()
        before = engine.stats()
        walls += _run(engine, steps, on_cuda)
        after = engine.stats()
        emitted += after["emitted_tokens"] - before["emitted_tokens"]
        for part in parts:
            parts[part] += after[part] - before[part]
        if on_cuda and number == len(groups) - 1:
            kernels = _kernel_seconds(engine)
        for name in names:
            engine.abort(name)
    total, count = sum(walls), len(walls)
    length = emitted / count / len(groups[0])
    draft, verify = (seconds / count for seconds in parts.values())
    return StepTimes(length, emitted / total, total / count, draft, verify, kernels, max(walls))


def _start(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, number: int) -> list[str]:
    """Adds the requests and steps until all of them decode; their names."""
    names = [f"{number}-{index}" for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add(Request(name, list(prompt), params))
    waiting = set(names)
    while waiting:
        waiting -= {update.id for update in engine.step()}
    return names


def _run(engine: Engine, steps: int, on_cuda: bool) -> list[float]:
    """Seconds of each step; what the last leaves on the device is waited for in its own time."""
    gc.collect()
    if on_cuda:
        torch.cuda.synchronize()
    moments = [time.perf_counter()]
    for number in range(steps):
        engine.step()
        if on_cuda and number == steps - 1:
            torch.cuda.synchronize()
        moments.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(moments)]


def _kernel_seconds(engine: Engine) -> float:
    """Device seconds of a step, as the profiler sees them."""
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(PROFILED):
            engine.step()
        torch.cuda.synchronize()
    spans = [each.time_range for each in record.events() if each.device_type == DeviceType.CUDA]
    return busy([(span.start, span.end) for span in spans]) * 1e-6 / PROFILED


def busy(spans: list[tuple[float, float]]) -> float:
    """Time that lies in one of the spans (start, end) or in several."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def copy_bandwidth(device: torch.device) -> float:
    """Bytes/s, read and written, of a large copy on this CPU: the best of a few."""
    source = torch.ones(64 << 20, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(6):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return 2 * source.numel() * 4 / min(seconds)
