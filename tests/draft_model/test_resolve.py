"""What the name `eagle3` becomes."""

import json
from pathlib import Path

import pytest

from draft_model import resolve
from draft_model.checkpoint import save_draft
from draft_model.resolve import list_runs, resolve_draft
from target_model.errors import UserError
from target_model.resolve import ResolvedTarget
from tests.draft_model.drafts import random_draft
from tests.fixtures import tiny_config


def target(name: str) -> ResolvedTarget:
    return ResolvedTarget(name, Path("weights") / name, tiny_config(num_layers=8))


def make_run(root: Path, name: str, trained_for: str, al: float | None) -> None:
    save_draft(random_draft(), root / name / "draft")
    best = None if al is None else {"al": al, "step": 5}
    record = {"name": name, "target": trained_for, "step": 5, "complete": True, "best": best}
    (root / name / "run.json").write_text(json.dumps(record))


def test_the_best_run_of_the_target(tmp_path):
    for name, trained_for, al in (("a", "mine", 1.4), ("b", "mine", 2.1), ("c", "other", 3.0), ("d", "mine", None)):
        make_run(tmp_path, name, trained_for, al)
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "run.json").write_text('{"name": "e"}')
    chosen = resolve_draft("eagle3", target("mine"), tmp_path)
    assert chosen.path == tmp_path / "b" / "draft"
    assert "run b (AL 2.10)" in chosen.why and "of 3" in chosen.why
    assert chosen.default_taps == (2, 4, 5)
    assert [run.name for run in list_runs(tmp_path)] == ["c", "b", "a", "d"]


def test_a_damaged_record_keeps_nobody_from_the_other_runs(tmp_path, capsys):
    make_run(tmp_path, "a", "mine", 1.4)
    make_run(tmp_path, "copied", "mine", 1.1)
    record = json.loads((tmp_path / "copied" / "run.json").read_text())
    (tmp_path / "copied" / "run.json").write_text(json.dumps(record | {"name": "a"}))
    for name, text in (("b", "{"), ("c", '{"name": "c"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    assert [run.name for run in list_runs(tmp_path)] == ["a", "copied"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" is ")[0] for line in lines] == ["spec: a run"] * 2
    assert f"{tmp_path}/b/run.json is not readable JSON" in lines[0] and f"{tmp_path}/c/run.json" in lines[1]


def test_the_bundled_one_comes_first(tmp_path, monkeypatch):
    make_run(tmp_path / "runs", "a", "mine", 9.0)
    save_draft(random_draft(), tmp_path / "bundled" / "mine-eagle3")
    monkeypatch.setattr(resolve.resources, "files", lambda package: tmp_path)
    chosen = resolve_draft("eagle3", target("mine"), tmp_path / "runs")
    assert chosen.path == tmp_path / "bundled" / "mine-eagle3" and "bundled for mine" in chosen.why


def test_a_directory(tmp_path):
    save_draft(random_draft(), tmp_path / "draft")
    assert resolve_draft(str(tmp_path / "draft"), target("mine")).path == tmp_path / "draft"


@pytest.mark.parametrize(
    ("name", "for_target", "named"),
    [
        ("eagle3", "unknown", "no draft eagle3 for unknown"),
        ("eagle3", "MiniMax-M3", "Inferact/MiniMax-M3-EAGLE3 is not in the local hub cache"),
        ("someone/something", "mine", "someone/something is not in the local hub cache"),
        ("./nowhere", "mine", r"\./nowhere is neither"),
        ("a/b/c", "mine", "a/b/c is neither a directory nor a valid hub id"),
    ],
)
def test_one_clear_sentence(tmp_path, name, for_target, named):
    with pytest.raises(UserError, match=named) as failure:
        resolve_draft(name, target(for_target), tmp_path)
    assert "\n" not in str(failure.value)
