"""Results of the acceptance benchmark made of numbers, without a model."""

import random
from dataclasses import asdict

from serve.request import StepRecord
from serve.tree import TreeConfig
from spec.bench.acceptance import Settings
from spec.bench.results import result_json
from spec.bench.statistics import measure
from spec.bench.sweep import Answer, Condition, Row, Time, short_name

SETTINGS = Settings(
    target="m3-tiny",
    drafts=("eagle3",),
    suites=("mt_bench",),
    prompts=12,
    stride=1,
    turns=None,
    tokens=96,
    shapes=(TreeConfig.chain(1), TreeConfig.chain(3)),
    temperatures=(0.0, 1.0),
    top_p=0.95,
    top_k=40,
    thinking=(False,),
    concurrency=(1,),
    seed=0,
    repeats=1,
    device="cpu",
)


def row(shape: TreeConfig, condition: Condition, rate: float, prompts: int = 12, identical: bool = True) -> Row:
    """Answers of 30 steps each; a drafted token is kept with this chance, which differs from prompt to prompt."""
    chance, answers = random.Random(1), []
    for number in range(prompts):
        own, steps = rate * chance.uniform(0.8, 1.2), []
        for _ in range(30):
            kept = 0
            while kept < shape.depth and chance.random() < own:
                kept += 1
            steps.append(StepRecord(shape.nodes - 1, kept, kept + 1))
        acceptance = measure(steps, shape.depth)
        spent, plain = Time(1.0, 0.1, 0.3, 0.5), Time(0.1 + 0.03 * acceptance.emitted, 0.1, 0.0, 0.6)
        category = "writing" if number % 2 else "coding"
        answers.append(
            Answer(f"p{number}", category, 1, number, acceptance, acceptance.emitted + 1, identical, spent, plain)
        )
    return Row("mt_bench", "eagle3", short_name(shape), shape, condition, tuple(answers))


def result(rate: float, **changes) -> dict:
    """Chains of 1 and 3, greedy and sampled."""
    rows = [row(shape, Condition(each), rate, **changes) for shape in SETTINGS.shapes for each in (0.0, 1.0)]
    return result_json(rows, asdict(SETTINGS), {"eagle3": "target m3-tiny: here\ndraft eagle3: there"})
