"""What a step of any shape costs, from a few measured ones, and the speed-up that this promises.

Verifying is interpolated over the nodes; drafting is a line in the depth and in the rows that the draft computes.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from serve.budget import OFF, Cost
from serve.measure import measure_costs
from serve.tree import TreeConfig
from spec.pair import Pair
from target_model.errors import UserError

PROBES = (
    OFF,
    TreeConfig.chain(1),
    TreeConfig.chain(3),
    TreeConfig.chain(8),
    TreeConfig(2, 4, 6),
    TreeConfig(4, 2, 9),
    TreeConfig(4, 8, 16),
    TreeConfig(5, 4, 24),
    TreeConfig(8, 4, 32),
    TreeConfig(8, 8, 64),
)
PASSES, LONGEST = 3, 1536
FIELDS = ("depth", "width", "nodes", "batch", "context", "draft", "verify")


class StepCosts:
    """Seconds of one step, by shape and batch, at the measured context that is nearest to `context`."""

    def __init__(self, costs: tuple[Cost, ...], context: int = 0):
        self.costs = costs
        context = min((cost.context for cost in costs), key=lambda measured: abs(measured - context))
        self._by_batch: dict[int, list[Cost]] = {}
        for cost in costs:
            if cost.context == context:
                self._by_batch.setdefault(cost.batch, []).append(cost)

    @property
    def batches(self) -> list[int]:
        return sorted(self._by_batch)

    def seconds(self, shape: TreeConfig, batch: int) -> float:
        """Of a step of `batch` sequences, linear between measured batches."""
        return float(np.interp(batch, self.batches, [self._seconds(shape, each) for each in self.batches]))

    def speed_up(self, shape: TreeConfig, length: float, batch: int) -> float:
        """Of decoding, at this acceptance length: a plain step yields one token."""
        return length * self.seconds(OFF, batch) / self.seconds(shape, batch)

    def _seconds(self, shape: TreeConfig, batch: int) -> float:
        costs = self._by_batch[batch]
        drafted = [cost for cost in costs if cost.shape != OFF]
        nodes = sorted({cost.shape.nodes for cost in costs})
        verify = [float(np.mean([cost.verify for cost in costs if cost.shape.nodes == count])) for count in nodes]
        seconds = float(np.interp(shape.nodes, nodes, verify))
        if shape == OFF:
            return seconds
        known = np.array([[1, cost.shape.depth, cost.shape.draft_rows] for cost in drafted], float)
        line, *_ = np.linalg.lstsq(known, np.array([cost.draft for cost in drafted]), rcond=None)
        # A line through noisy times may dip below what the cheapest measured draft took.
        floor = min(cost.draft for cost in drafted)
        return seconds + max(float(line @ [1, shape.depth, shape.draft_rows]), floor)


def measure(pair: Pair, largest_batch: int, context: int) -> StepCosts:
    """Real steps on this machine, for contexts of about `context` tokens. The fastest of a few passes counts: whatever
    else the machine does only adds to a step.
    """
    limit = min(pair.target.config.max_position, LONGEST)
    fastest: dict[tuple[TreeConfig, int, int], Cost] = {}
    for _ in range(PASSES):
        table = measure_costs(
            pair.target, pair.draft, max_running=largest_batch, context=limit, shapes=PROBES, greedy=False
        )
        for cost in table.costs:
            key = cost.shape, cost.batch, cost.context
            if key not in fastest or cost.draft + cost.verify < fastest[key].draft + fastest[key].verify:
                fastest[key] = cost
    return StepCosts(tuple(fastest.values()), context)


def costs_json(costs: StepCosts) -> list[dict[str, Any]]:
    """What `read_costs` reads: seconds of one step."""
    return [
        {name: value for name, value in {**asdict(cost.shape), **asdict(cost)}.items() if name in FIELDS}
        for cost in costs.costs
    ]


def read_costs(path: Path) -> StepCosts:
    """A cost table of another machine: a JSON list of objects with the fields of FIELDS, seconds of one step. Plain
    decoding is depth 1, width 1, nodes 1.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path} must hold a list of costs")
    costs = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or sorted(row) != sorted(FIELDS):
            raise UserError(f"{path}: cost {number} must have the fields {', '.join(FIELDS)} and no other")
        if not all(isinstance(value, int | float) and value > 0 or name == "draft" for name, value in row.items()):
            raise UserError(f"{path}: cost {number} must hold positive numbers")
        shape = TreeConfig(int(row["depth"]), int(row["width"]), int(row["nodes"]))
        costs.append(Cost(shape, int(row["batch"]), int(row["context"]), float(row["draft"]), float(row["verify"])))
    shapes = {cost.shape for cost in costs}
    if OFF not in shapes or len(shapes) < 4:
        raise UserError(f"{path} must hold plain decoding (depth 1, width 1, nodes 1) and three other shapes or more")
    return StepCosts(tuple(costs))
