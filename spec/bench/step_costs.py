"""`spec bench costs`: what a step costs on this machine, of a target with its own or with random weights.

Which tokens are drafted does not matter to the time of a step, so random weights of the real size will do. The file is
what `spec bench acceptance --analyse --costs` reads: acceptance measured in one place, costs in another.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from serve.budget import OFF
from spec.bench.costs import StepCosts, costs_json, measure
from spec.pair import load_pair
from target_model.dummy import DummyWeights
from target_model.errors import write_json


@dataclass(frozen=True)
class Settings:
    """`batch`: the largest, smaller ones are measured too."""

    target: str
    draft: str
    dummy: DummyWeights | None
    tensor_parallel: int
    batch: int
    device: str


def run(settings: Settings, output: Path | None, console: Console | None = None) -> None:
    """Measures, prints a table and one JSON line, and writes the file when one is named."""
    console = console or Console(highlight=False)
    pair = load_pair(
        settings.target,
        settings.draft,
        settings.device,
        dummy=settings.dummy,
        tensor_parallel=settings.tensor_parallel,
    )
    console.print(pair.description)
    costs = measure(pair, settings.batch, context=0)
    console.print(costs_table(costs))
    if output is not None:
        write_json(output, costs_json(costs))
        console.print(f"costs: {output}")
    plain = {str(batch): round(1000 * costs.seconds(OFF, batch), 3) for batch in costs.batches}
    print(json.dumps({"benchmark": "costs", "plain_ms": plain}))


def costs_table(costs: StepCosts) -> Table:
    """Every measured step. Drafting pays where the acceptance length exceeds the last column."""
    table = Table(title="one step; shape: depth,width,nodes, the root counted; 1,1,1 drafts nothing")
    for heading in ("shape", "batch", "context", "draft ms", "verify ms", "both ms", "x plain"):
        table.add_column(heading, justify="right")
    plain = {(cost.batch, cost.context): cost.draft + cost.verify for cost in costs.costs if cost.shape == OFF}
    for cost in costs.costs:
        shape, seconds = cost.shape, cost.draft + cost.verify
        table.add_row(
            f"{shape.depth},{shape.width},{shape.nodes}",
            str(cost.batch),
            str(cost.context),
            *(f"{1000 * part:.2f}" for part in (cost.draft, cost.verify, seconds)),
            f"{seconds / plain[cost.batch, cost.context]:.2f}",
        )
    return table
