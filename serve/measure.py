"""The cost table of this machine: real steps of every shape, timed over random tokens."""

import math
import random
import statistics
import time

import numpy as np
import torch

from draft_model.model import Eagle3Draft
from serve.budget import OFF, Cost, CostTable
from serve.engine import Engine
from serve.request import Request, SamplingParams
from serve.tree import TreeConfig, step_slots
from target_model.model import TargetModel

SHAPES = (
    OFF,
    TreeConfig.chain(1),
    TreeConfig.chain(2),
    TreeConfig.chain(3),
    TreeConfig.chain(5),
    TreeConfig(2, 2, 5),
    TreeConfig(3, 2, 7),
    TreeConfig(4, 3, 12),
    TreeConfig(5, 4, 24),
)
LONGEST_SAMPLE = 1024
# Turns of every shape, and its steps in each. A step on the device begins the next one of the same shape ahead, so that
# the third shows what it costs among others.
TURNS, DEVICE_TURNS = (4, 1), (2, 3)
WAITS = (1, 8)  # steps without drafts, whose rows of the draft are timed together


def measure_costs(
    target: TargetModel,
    draft: Eagle3Draft,
    *,
    max_running: int,
    context: int,
    shapes: tuple[TreeConfig, ...] = SHAPES,
) -> CostTable:
    """Times every shape at one, some and many sequences, of short and longer contexts; sampled, with M3's filters.

    Drafts of random tokens are hardly ever accepted, so a sequence stays as long as it is; the fastest of a few
    repeats counts, since whatever else the machine does only adds to it.
    """
    batches = sorted({1, min(4, max_running), min(16, max_running)})
    room = 8 * sum(shape.depth + 1 for shape in shapes) + 2 * sum(WAITS)
    contexts = sorted({min(size, max(8, context - room)) for size in (64, LONGEST_SAMPLE)})
    costs, waits, changes = [], [], []
    for batch in batches:
        for length in contexts:
            measured, waited, change = _measure(target, draft, shapes, batch, length, room)
            costs += measured
            waits += waited
            changes.append(change)
    row, wake = np.polyfit(*zip(*waits, strict=True), 1)
    # On a CPU every step that drafts computes rows of the draft first, so its own costs hold the wake.
    wake = max(float(wake), 0.0) if target.device.type == "cuda" else 0.0
    return CostTable(tuple(costs), max(float(row), 0.0), wake, statistics.median(changes))


def _measure(
    target: TargetModel, draft: Eagle3Draft, shapes: tuple[TreeConfig, ...], batch: int, length: int, room: int
) -> tuple[list[Cost], list[tuple[int, float]], float]:
    """The costs; numbers of the draft's rows with the seconds that they take when they have waited; and what the first
    steps of a shape take beyond the later ones.
    """
    largest = max(shapes, key=lambda shape: shape.scratch_slots)
    pages = batch * -(-(length + room + step_slots(shapes, ahead=True)) // target.config.block_size)
    engine = Engine(target, draft, largest, pages=pages, max_running=batch)
    chance = random.Random(0)
    params = SamplingParams(temperature=1.0, top_p=0.95, top_k=40, seed=0, max_tokens=room, ignore_eos=True)
    for index in range(batch):
        prompt = [chance.randrange(target.config.vocab_size) for _ in range(length)]
        engine.add(Request(str(index), prompt, params))
    while not all(sequence.decoding for _, _, sequence in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    # The shapes take turns, so a machine whose speed drifts slows all of them alike.
    times: dict[TreeConfig, list[tuple[float, float]]] = {shape: [] for shape in shapes}
    together = dict.fromkeys(shapes, math.inf)  # all steps of a turn
    clock = engine.runner.clock
    device_step = engine.runner.device_step
    turns, steps = DEVICE_TURNS if device_step else TURNS
    for engine.tree in (shape for _ in range(turns) for shape in shapes):
        if device_step:
            device_step.give_up_ahead()  # that would be one of the shape before
        first = time.perf_counter()
        for _ in range(steps):
            begin, drafted = time.perf_counter(), clock.draft
            engine.step()
            drafted = clock.draft - drafted
            # All of a step counts, also what the host does around it.
            times[engine.tree].append((drafted, time.perf_counter() - begin - drafted))
        together[engine.tree] = min(together[engine.tree], time.perf_counter() - first)
    costs = [Cost(shape, batch, length, *min(taken, key=sum)) for shape, taken in times.items()]
    change = statistics.median(together[cost.shape] - steps * (cost.draft + cost.verify) for cost in costs)
    engine.tree = OFF
    waited = [(batch * steps, min(_follow_seconds(engine, steps) for _ in range(2))) for steps in WAITS]
    return costs, waited, change


def _follow_seconds(engine: Engine, steps: int) -> float:
    """Of the draft's rows of so many plain steps."""
    sequences = [sequence for _, _, sequence in engine.scheduler.running]
    engine.runner.drafter.follow(sequences)
    for _ in range(steps):
        engine.step()
    _wait(engine)
    begin = time.perf_counter()
    engine.runner.drafter.follow(sequences)
    _wait(engine)
    return time.perf_counter() - begin


def _wait(engine: Engine) -> None:
    if engine.runner.device.type == "cuda":
        torch.cuda.synchronize(engine.runner.device)
