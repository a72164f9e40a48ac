"""Costs of steps: shapes between the measured ones, files, and what a tree search makes of them."""

import json

import pytest

from serve.budget import OFF, Cost
from serve.tree import TreeConfig
from spec.bench.costs import PROBES, StepCosts, costs_json, read_costs
from spec.bench.token_types import kinds
from spec.bench.tune import candidates, finalists, parse_batches, rank
from target_model.errors import UserError
from tests.spec.test_replay import tiny


def seconds(shape: TreeConfig, batch: int) -> tuple[float, float]:
    """Drafting and verifying of a machine that is easy to predict."""
    drafting = 0.0 if shape == OFF else 0.001 * batch * (1 + shape.depth + 0.1 * shape.draft_rows)
    return drafting, 0.01 * batch * (1 + shape.nodes / 16)


def costs(batches: tuple[int, ...] = (1, 4)) -> StepCosts:
    return StepCosts(tuple(Cost(shape, batch, 64, *seconds(shape, batch)) for shape in PROBES for batch in batches))


@pytest.mark.parametrize("shape", [TreeConfig.chain(5), TreeConfig(6, 3, 20), TreeConfig(3, 2, 6), OFF], ids=str)
def test_shapes_between_the_measured_ones(shape):
    for batch in (1, 2, 4):
        assert costs().seconds(shape, batch) == pytest.approx(sum(seconds(shape, batch)))
    assert costs().speed_up(shape, 3.0, 1) == pytest.approx(3 * sum(seconds(OFF, 1)) / sum(seconds(shape, 1)))


def test_the_nearest_context_counts():
    both = [
        Cost(c.shape, c.batch, context, c.draft, c.verify * context) for c in costs().costs for context in (64, 512)
    ]
    short, long = (StepCosts(tuple(both), context).seconds(OFF, 1) for context in (200, 300))
    assert long == pytest.approx(8 * short)


def test_a_file_of_costs(tmp_path):
    path = tmp_path / "costs.json"
    rows = costs_json(costs())
    path.write_text(json.dumps(rows))
    assert read_costs(path).costs == costs().costs
    for broken, message in (
        ([{**rows[0], "extra": 1}], "cost 1 must have the fields"),
        ([{**rows[0], "verify": 0}], "positive numbers"),
        (rows[2:4], "must hold plain decoding"),
        ({}, "must hold a list"),
    ):
        path.write_text(json.dumps(broken))
        with pytest.raises(UserError, match=message):
            read_costs(path)


def test_the_search_prefers_what_costs_and_acceptance_promise():
    """Verifying is cheap here and the recorded text follows the second guess too: a wide tree wins over any chain."""
    ranked = rank([tiny()], costs(), (1,))
    assert list(ranked.values()) == sorted(ranked.values(), reverse=True)
    assert next(iter(ranked)).width == 2
    dear = StepCosts(tuple(Cost(c.shape, c.batch, 64, c.draft, 0.01 * c.shape.nodes**2) for c in costs((1,)).costs))
    assert next(iter(rank([tiny()], dear, (1,)))).nodes == 2
    chosen = finalists(ranked, 3)
    assert any(shape.width == 1 for shape in chosen) and any(shape.paths for shape in chosen) and TreeConfig() in chosen
    assert all(shape.width > 1 for shape in candidates([tiny()]) if shape.paths)


def test_batches():
    assert parse_batches("3") == (3,) and parse_batches("1..6") == (1, 2, 4, 6) and parse_batches("4..8") == (4, 8)
    for text in ("0", "8..4", "x", "1..", "1..999"):
        with pytest.raises(UserError, match="--batch"):
            parse_batches(text)


def test_the_whole_search(monkeypatch, capsys, tmp_path, untrained_draft):
    from spec import cli
    from spec.tree_file import read_tree

    monkeypatch.setattr("spec.bench.costs.PASSES", 1)
    monkeypatch.setattr("spec.bench.costs.LONGEST", 64)
    path = tmp_path / "tree.yaml"
    line = (
        f"spec tune tree --draft {untrained_draft} --prompts 1 --tokens 8 --temperature 1 --finalists 1 --output {path}"
    )
    for ending, code in (("", 0), ("--batch 4", 2)):
        monkeypatch.setattr("sys.argv", [*line.split(), *ending.split()])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert (stop.value.code or 0) == code
    out, error = capsys.readouterr()
    shape = read_tree(path)
    assert shape == OFF or shape.nodes > 1
    assert json.loads(out.strip().splitlines()[-1])["benchmark"] == "tune tree"
    assert "1 prompts are too few for a batch of 4" in error


class Bytes:
    special = {"<end>": 9}

    def token_bytes(self, token: int) -> bytes:
        return [b"The ", b"sum", b"\n", b"```", b"python", b" x_1", b"+", b" 42", b"```", b"", b" Bob"][token]


def test_kinds_of_tokens():
    found = kinds(Bytes(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 9])
    assert found == [
        ("prose", "names"), ("prose", "words"), ("prose", "whitespace"), ("prose", "symbols"), ("code", "names"),
        ("code", "names"), ("code", "symbols"), ("code", "digits"), ("code", "symbols"), ("prose", "names"),
        ("prose", "special"),
    ]  # fmt: skip
