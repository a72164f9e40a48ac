"""`spec bench costs`, with random weights in place of a target that is not at hand."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve.budget import OFF
from serve.tree import TreeConfig
from spec.bench import costs
from spec.cli import app

SHAPES = (OFF, TreeConfig.chain(1), TreeConfig.chain(2), TreeConfig(2, 2, 5))


def test_costs_of_a_target_with_random_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(costs, "PROBES", SHAPES)
    monkeypatch.setattr(costs, "PASSES", 1)
    monkeypatch.setattr(costs, "LONGEST", 96)
    file = tmp_path / "costs.json"
    options = ["--dummy-weights", "mxfp8", "--layers", "7", "--batch", "1", "--device", "cpu", "--output", str(file)]
    outcome = CliRunner().invoke(app, ["bench", "costs", *options])
    assert outcome.exit_code == 0, outcome.output
    assert "random weights as mxfp8, the first 7 layers" in outcome.output and "2,2,5" in outcome.output
    measured = costs.read_costs(file)
    assert {cost.shape for cost in measured.costs} == set(SHAPES)
    assert all(cost.verify > 0 for cost in measured.costs)
    last = json.loads(outcome.output.splitlines()[-1])
    assert last["benchmark"] == "costs" and last["plain_ms"]["1"] > 0


def test_layers_need_dummy_weights():
    outcome = CliRunner().invoke(app, ["bench", "costs", "--layers", "7"])
    assert "--layers shortens a target of --dummy-weights only" in str(outcome.exception)
