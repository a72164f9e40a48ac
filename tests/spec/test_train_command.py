"""`spec train` from the command line: the judge of the command line chooses the draft that is exported."""

import json

import pytest

from draft_model.checkpoint import load_draft
from spec import cli


@pytest.mark.slow
def test_run_is_judged_exported_and_ready_to_serve(monkeypatch, capsys, tmp_path):
    overrides = "name=tiny data.max_documents=8 draft.initialisation=random schedule.epochs=null schedule.steps=2"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["spec", "train", "--config", "demo", "--quiet", *overrides.split()])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    out = capsys.readouterr().out
    assert "trained 2 steps, AL 1." in out and "spec serve --draft runs/tiny/draft" in out
    record = json.loads((tmp_path / "runs" / "tiny" / "run.json").read_text())
    assert record["complete"] and record["best"]["al"] >= 1 and record["best"]["prompts"] == 16
    assert load_draft(tmp_path / "runs" / "tiny" / "draft").config.vocab_size == 4096
