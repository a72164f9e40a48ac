"""The cost table of this machine: real steps of every shape, timed over random tokens."""

import math
import random
import time
from itertools import product
from operator import itemgetter

import numpy as np

from draft_model.model import Eagle3Draft
from serve.budget import OFF, Cost, CostTable
from serve.engine import Engine
from serve.request import Request, SamplingParams
from serve.tree import Tree, TreeConfig, step_slots
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
# Turns of every shape, its steps in each, and how many of them do not count. A step on the device begins the next one
# of its shape ahead, and what the host does behind one is part of the next: so the fourth is the first among its like.
TURNS, DEVICE_TURNS = (6, 1, 0), (2, 6, 3)
WAITS = (1, 8)  # steps without drafts, behind which the first one that drafts is timed


def measure_costs(
    target: TargetModel,
    draft: Eagle3Draft,
    *,
    max_running: int,
    context: int,
    shapes: tuple[TreeConfig, ...] = SHAPES,
    greedy: bool | None = None,
) -> CostTable:
    """Times every shape at one, some and many sequences, of short and longer contexts; sampled, with M3's filters, and
    `greedy` as well: by default on a GPU, where noise makes drafting dearer than verifying.

    Drafts of random tokens are hardly ever accepted, so a sequence stays as long as it is; but where that makes a step
    cheaper, one of each tree is accepted by decree. The fastest of a few repeats counts, since whatever else the
    machine does only adds to it.
    """
    batches = sorted({1, min(4, max_running), min(16, max_running)})
    most = max(turns * steps for turns, steps, _ in (TURNS, DEVICE_TURNS))
    room = most * sum(shape.depth + 1 for shape in shapes) + 6 * (max(WAITS) + 4)
    contexts = sorted({min(size, max(8, context - room)) for size in (64, LONGEST_SAMPLE)})
    costs: dict[bool, list[Cost]] = {False: [], True: []}
    waits, both = [], target.device.type == "cuda" if greedy is None else greedy
    for batch, length, is_greedy in product(batches, contexts, (False, True) if both else (False,)):
        engine = _engine(target, draft, shapes, batch, length, room, greedy=is_greedy)
        taken = _step_seconds(engine, shapes)
        costs[is_greedy] += [Cost(shape, batch, length, *seconds) for shape, seconds in taken.items()]
        if not is_greedy:
            drafting = next(shape for shape in shapes if shape != OFF)
            usual = sum(taken[drafting])
            waits += [(rows - batch, seconds - usual) for rows, seconds in _first_steps(engine, drafting)]
    row, wake = (max(float(each), 0.0) for each in np.polyfit(*zip(*waits, strict=True), 1))
    # A step on the device computes the draft's rows of a whole path, however much of it was accepted.
    kept = 0.0 if engine.runner.device_step else row
    return CostTable(tuple(costs[False]), row, wake, kept, tuple(costs[True]))


def _engine(
    target: TargetModel,
    draft: Eagle3Draft,
    shapes: tuple[TreeConfig, ...],
    batch: int,
    length: int,
    room: int,
    *,
    greedy: bool,
) -> Engine:
    """With so many sequences of that length, whose prompts have been computed."""
    largest = max(shapes, key=lambda shape: shape.scratch_slots)
    pages = batch * -(-(length + room + step_slots(shapes, ahead=True)) // target.config.block_size)
    engine, chance = Engine(target, draft, largest, pages=pages, max_running=batch), random.Random(0)
    # A step on the device does the same whatever is accepted.
    engine.runner.synthetic = None if engine.runner.device_step else _FirstChild()
    params = SamplingParams(0.0 if greedy else 1.0, top_p=0.95, top_k=40, seed=0, max_tokens=room, ignore_eos=True)
    for index in range(batch):
        prompt = [chance.randrange(target.config.vocab_size) for _ in range(length)]
        engine.add(Request(str(index), prompt, params))
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
    for engine.tree in (shape for _ in range(turns) for shape in shapes):
        if device_step:
            device_step.give_up_ahead()  # that would be one of the shape before
        for _ in range(passed):
            engine.step()
        begin, drafted, timed = time.perf_counter(), clock.draft, steps - passed
        for _ in range(timed):
            engine.step()
        drafted = (clock.draft - drafted) / timed
        verified = (time.perf_counter() - begin) / timed - drafted
        best[engine.tree] = min(best[engine.tree], (drafted, verified), key=sum)
    return best


def _first_steps(engine: Engine, shape: TreeConfig) -> list[tuple[int, float]]:
    """Numbers of the draft's rows that have waited, with the seconds of the step that drafts then."""
    # The first time of a number of rows may be spent on making a graph.
    return [min((_first_step(engine, shape, steps) for _ in range(3)), key=itemgetter(1)) for steps in WAITS]


def _first_step(engine: Engine, shape: TreeConfig, steps: int) -> tuple[int, float]:
    """The draft's rows that wait behind so many steps without drafts, and the seconds of the step that drafts then."""
    engine.tree = OFF
    for _ in range(steps + 1):  # what has been begun ahead may draft
        engine.step()
    engine.tree = shape
    if engine.runner.device_step:
        engine.step()  # the last one without drafts had been begun
    rows = sum(sequence.computed + 1 - sequence.draft_end for _, _, sequence in engine.scheduler.running)
    begin = time.perf_counter()
    engine.step()
    return rows, time.perf_counter() - begin
