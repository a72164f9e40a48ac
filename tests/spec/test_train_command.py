"""`spec train` from the command line: the judge of the command line chooses the draft that is exported, and a run that
is stopped says so.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from draft_model.checkpoint import load_draft
from spec import cli
from train import loop


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


@pytest.mark.parametrize(
    ("number", "step", "overrides", "told"),
    [
        (signal.SIGINT, 14, [], "Ctrl-C at step 14; last checkpoint {state}: the same command continues from there"),
        (signal.SIGTERM, 9, [], "SIGTERM at step 9; no checkpoint yet: the same command starts again"),
        (signal.SIGTERM, None, [], "SIGTERM while starting up; last checkpoint {state}: the same command continues"),
        (signal.SIGINT, 12, ["resume=false"], "Ctrl-C at step 12; last checkpoint {state}: the same command without"),
    ],
)
def test_a_run_that_is_stopped_says_where(monkeypatch, capfd, tmp_path, number, step, overrides, told):
    state = tmp_path / "runs" / "mine" / "state" / "step-00000010"
    if "{state}" in told:
        state.mkdir(parents=True)
        state.with_name("step-00000014.partial").mkdir()

    def stopped(config, *, stop, **_):
        if step is not None:
            assert not stop(step - 1)
        signal.pthread_kill(threading.main_thread().ident, number)  # else another thread may get it first
        return loop.TrainResult(config.run_directory, config.run_directory, step, stop(step), None, {})

    before = signal.getsignal(number)
    monkeypatch.setattr(loop, "train", stopped)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["spec", "train", "--config", "demo", "--quiet", "name=mine", *overrides])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capfd.readouterr()
    assert stop.value.code == 128 + number and not out and signal.getsignal(number) is before
    *first, last = err.splitlines()
    assert last.startswith("spec: stopped by " + told.format(state=state.relative_to(tmp_path)))
    assert len(first) == (step is not None) and all("stopping behind this step" in line for line in first)


@pytest.mark.slow
def test_a_stopped_run_leaves_a_checkpoint_of_its_step(tmp_path):
    command = [sys.executable, "-m", "spec.cli", "train", "--config", "demo", "--quiet", "name=mine", "log.every=1"]
    command += ["data.max_documents=64", "draft.initialisation=random", "schedule.epochs=null", "schedule.steps=400"]
    command += ["eval.judge=none"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        log = tmp_path / "runs" / "mine" / "log.jsonl"
        while not log.exists() or log.read_text().count("\n") < 3:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        last = process.stderr.read().splitlines()[-1]
    done = json.loads(log.read_text().splitlines()[-1])["step"]
    assert 3 <= done < 400
    assert f"SIGTERM at step {done}; last checkpoint runs/mine/state/step-{done:08}: the same command continues" in last
