"""The cost table of this machine: real steps of every shape, timed over random tokens."""

import gc
import math
import random
import time
from dataclasses import dataclass
from itertools import product
from operator import itemgetter

import numpy as np

from draft_model.model import Eagle3Draft
from serve.budget import OFF, Cost, CostTable
from serve.engine import Engine
from serve.request import Request, SamplingParams
from serve.tree import Tree, TreeConfig, step_slots
from target_model.errors import UserError
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
SHORTEST, LONGEST_SAMPLE = 8, 1024
# Turns of every shape, its steps in each, and how many of them do not count. A step on the device begins the next one
# of its shape ahead, and what the host does behind one is part of the next: so the fourth is the first among its like.
TURNS, DEVICE_TURNS = (6, 1, 0), (2, 6, 3)
WAITS = (1, 8)  # steps without drafts, behind which the first one that drafts is timed
REPEATS = 3
PREFILL = 512


@dataclass(frozen=True)
class _Setting:
    """What is measured together: so many sequences behind prompts of so many tokens, with room for `room` more."""

    batch: int
    length: int
    greedy: bool
    room: int
    device_step: bool | None


def measure_costs(
    target: TargetModel,
    draft: Eagle3Draft,
    *,
    max_running: int,
    context: int,
    shapes: tuple[TreeConfig, ...] = SHAPES,
    greedy: bool | None = None,
    device_step: bool | None = None,
) -> CostTable:
    """Times every shape at one, some and many sequences, of short and longer contexts; sampled, with M3's filters, and
    `greedy` as well: by default on a GPU, where noise is a larger part of drafting than of verifying. `device_step`: as
    for an engine. UserError where the target's contexts are too short for that.

    Drafts of random tokens are hardly ever accepted, so a sequence stays as long as it is; but where that makes a step
    cheaper, one of each tree is accepted by decree. The fastest of a few repeats counts, since whatever else the
    machine does only adds to it.
    """
    batches = sorted({1, min(4, max_running), min(16, max_running)})
    most = max(turns * steps for turns, steps, _ in (TURNS, DEVICE_TURNS))
    deepest = max(shape.depth for shape in shapes)
    room = most * sum(shape.depth + 1 for shape in shapes) + 2 * REPEATS * (max(WAITS) + 2 + 2 * deepest)
    room += batches[-1] * LONGEST_SAMPLE // PREFILL + 1  # the first are decoded while the last prompts are read
    if room + SHORTEST > target.config.max_position:
        raise UserError(
            f"measuring what drafting costs takes {room + SHORTEST} tokens of context, and the target has "
            f"{target.config.max_position}: an adaptive tree is not possible"
        )
    lengths = sorted({min(size, max(SHORTEST, context - room)) for size in (64, LONGEST_SAMPLE)})
    kinds = (False, True) if greedy or (greedy is None and target.device.type == "cuda") else (False,)
    costs: dict[bool, list[Cost]] = {False: [], True: []}
    waits = []
    for batch, length, kind in product(batches, lengths, kinds):
        measured, waited, on_device = _measure(target, draft, shapes, _Setting(batch, length, kind, room, device_step))
        costs[kind] += measured
        waits += waited
        gc.collect()  # an engine holds itself, and a cache on a GPU is large
    row, wake = (max(float(each), 0.0) for each in np.polyfit(*zip(*waits, strict=True), 1))
    # A step on the device computes the draft's rows of a whole path, however much of it was accepted.
    return CostTable(tuple(costs[False]), row, wake, 0.0 if on_device else row, tuple(costs[True]))


def _measure(
    target: TargetModel, draft: Eagle3Draft, shapes: tuple[TreeConfig, ...], setting: _Setting
) -> tuple[list[Cost], list[tuple[int, float]], bool]:
    """The costs; numbers of the draft's rows that wait beyond the usual, with what the step that drafts then takes
    beyond the usual; and whether steps stay on the device.
    """
    engine = _engine(target, draft, shapes, setting)
    taken = _step_seconds(engine, shapes)
    costs = [Cost(shape, setting.batch, setting.length, *seconds) for shape, seconds in taken.items()]
    on_device = engine.runner.device_step is not None
    # Of the general way the token that was kept and the bonus, of the device only what has not been followed there.
    usual = setting.batch * (1 if on_device else 2)
    drafting = next(shape for shape in shapes if shape != OFF)
    first = [] if setting.greedy else _first_steps(engine, drafting)
    if len(engine.scheduler.running) < setting.batch:
        raise RuntimeError("a sequence has ended while its steps were measured")
    return costs, [(rows - usual, seconds - sum(taken[drafting])) for rows, seconds in first], on_device


def _engine(target: TargetModel, draft: Eagle3Draft, shapes: tuple[TreeConfig, ...], setting: _Setting) -> Engine:
    """With its sequences, whose prompts have been computed."""
    batch, length, room = setting.batch, setting.length, setting.room
    largest = max(shapes, key=lambda shape: shape.scratch_slots)
    pages = batch * -(-(length + room + step_slots(shapes, ahead=True)) // target.config.block_size)
    settings = {"pages": pages, "max_running": batch, "prefill_tokens": PREFILL, "device_step": setting.device_step}
    engine, chance = Engine(target, draft, largest, **settings), random.Random(0)
    # A step on the device does the same whatever is accepted.
    engine.runner.synthetic = None if engine.runner.device_step else _FirstChild()
    temperature = 0.0 if setting.greedy else 1.0
    params = SamplingParams(temperature, top_p=0.95, top_k=40, seed=0, max_tokens=room, ignore_eos=True)
    for index in range(batch):
        prompt = [chance.randrange(target.config.vocab_size) for _ in range(length)]
        engine.add(Request(str(index), prompt, params))
    engine.tree = OFF
    while not all(sequence.decoding for _, _, sequence in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    return engine


class _FirstChild:
    """Each tree keeps one drafted token."""

    def path(self, tree: Tree) -> list[int]:
        return [1] if len(tree) > 1 else []


def _step_seconds(engine: Engine, shapes: tuple[TreeConfig, ...]) -> dict[TreeConfig, tuple[float, float]]:
    """Of a step of every shape, to draft and to verify; all of a step counts, also what the host does around it."""
    best = dict.fromkeys(shapes, (math.inf, math.inf))
    clock, device_step = engine.runner.clock, engine.runner.device_step
    turns, steps, passed = DEVICE_TURNS if device_step else TURNS
    # The shapes take turns, so a machine whose speed drifts slows all of them alike.
    for shape in (shape for _ in range(turns) for shape in shapes):
        if device_step:
            device_step.give_up_ahead()  # that would be one of the shape before
        # The first one that drafts again has more to do.
        unusual = max(passed, engine.tree == OFF != shape)
        engine.tree = shape
        for _ in range(unusual):
            engine.step()
        begin, drafted, timed = time.perf_counter(), clock.draft, steps - passed
        for _ in range(timed):
            engine.step()
        drafted = (clock.draft - drafted) / timed
        verified = (time.perf_counter() - begin) / timed - drafted
        best[shape] = min(best[shape], (drafted, verified), key=sum)
    return best


def _first_steps(engine: Engine, shape: TreeConfig) -> list[tuple[int, float]]:
    """Numbers of the draft's rows that have waited, with the seconds of the step that drafts then."""
    # The first time of a number of rows may be spent on making a graph.
    return [min((_first_step(engine, shape, steps) for _ in range(REPEATS)), key=itemgetter(1)) for steps in WAITS]


def _first_step(engine: Engine, shape: TreeConfig, steps: int) -> tuple[int, float]:
    """The draft's rows that wait behind some steps without drafts, and the seconds of the step that drafts then."""
    engine.tree = OFF
    for _ in range(steps + 1):  # on the device the first is one that had been begun, which may draft
        engine.step()
    engine.tree = shape
    if engine.runner.device_step:
        engine.step()  # the last one without drafts had been begun
    rows = sum(sequence.computed + 1 - sequence.draft_end for _, _, sequence in engine.scheduler.running)
    begin = time.perf_counter()
    engine.step()
    return rows, time.perf_counter() - begin
