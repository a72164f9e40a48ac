"""Two processes over gloo compute what one does, whatever the ZeRO stage."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from draft_model.checkpoint import load_draft

SCRIPT = """
import json, sys
from train.config import parse_config
from train.loop import train
config, stop = parse_config(json.loads(sys.argv[1])), int(sys.argv[2])
train(config, judge=lambda draft, target: {"al": 1.0}, progress=False, stop_after=stop)
"""


def run(
    tmp_path: Path,
    processes: int,
    name: str = "",
    stop: int = 4,
    steps: int = 4,
    checkpoint_every: int = 100,
    packing: bool = False,
    features: dict | None = None,
    judge: dict | None = None,
    wait: bool = True,
    **engine,
):
    """The run's folder, or without `wait` the process that has been started."""
    data = tmp_path / "rows.jsonl"
    texts = ["def add(a, b):\n    return a + b\n", "for i in range(10):\n    print(i)\n", "x = [1]\ny = sum(x)\n"]
    data.write_text("".join(json.dumps({"text": text * (2 + i)}) + "\n" for i, text in enumerate(texts * 2)))
    name = name or f"p{processes}-z{engine.get('zero_stage', 0)}"
    config = {
        "name": name,
        "output": str(tmp_path / "runs"),
        "data": {"path": str(data), "sequence_length": 40, "packing": packing},
        "ttt": {"steps": 3},
        "schedule": {"steps": steps},
        "engine": {"device": "cpu", "dtype": "float32", "threads": 1, "micro_batch": 4 // processes} | engine,
        "checkpoint": {"every": checkpoint_every, "export_dtype": "float32"},
        "features": features or {},
        "eval": judge or {},
        "log": {"every": 1},
    }
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    command = [*launcher, str(script), json.dumps(config), str(stop)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    if not wait:
        # Without the launcher: what it had started would outlive its own death. A group of its own is killed whole.
        silent = subprocess.DEVNULL
        return subprocess.Popen(
            [sys.executable, *command[len(launcher) :]],
            env=environment,
            stdout=silent,
            stderr=silent,
            start_new_session=True,
        )
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return tmp_path / "runs" / name


def logged(directory: Path, key: str) -> list[float]:
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_processes_equal_one(tmp_path, stage):
    alone = run(tmp_path, 1, zero_stage=min(stage, 1))
    shared = run(tmp_path, 2, zero_stage=stage)
    assert logged(shared, "loss") == pytest.approx(logged(alone, "loss"), rel=1e-5)
    if stage >= 1:
        # Adam forgives a gradient of the wrong size, so it is compared too.
        assert logged(shared, "grad_norm") == pytest.approx(logged(alone, "grad_norm"), rel=1e-4)
    ours, theirs = load_draft(shared / "draft"), load_draft(alone / "draft")
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name], atol=1e-5, rtol=1e-4)
    if stage >= 1:
        # Each rank's file holds half of the optimizer state: fp32 masters (and moments) of 1.57 M trained parameters.
        files = sorted((shared / "state" / "step-00000004").glob("*optim_states.pt"))
        assert len(files) == 2 and all(path.stat().st_size < 0.75 * 12 * 1.6e6 for path in files)


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    """kill -9 behind the first checkpoint, in mid-epoch and with packing; then the same command again."""
    settings = {"zero_stage": 1, "checkpoint_every": 2, "packing": True}
    straight = run(tmp_path, 1, "straight", stop=8, steps=8, **settings)
    process = run(tmp_path, 1, "killed", stop=8, steps=8, wait=False, **settings)
    state = tmp_path / "runs" / "killed" / "state"
    deadline = time.monotonic() + 120
    while not list(state.glob("step-0000000[24]")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert logged(state.parent, "step")[-1] < 8
    assert logged(run(tmp_path, 1, "killed", stop=8, steps=8, **settings), "loss") == logged(straight, "loss")
    ours, theirs = (load_draft(directory / "draft").state_dict() for directory in (state.parent, straight))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "before", "after"), [(2, 2, 1), (3, 1, 2)])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, stage, before, after):
    """Same rows in a step, weights, moments and schedule: the losses and the draft are those of one run."""
    straight = run(tmp_path, 1, "straight", zero_stage=1)
    moved = run(tmp_path, before, "moved", stop=2, zero_stage=stage, micro_batch=4 // before)
    assert run(tmp_path, after, "moved", zero_stage=stage, micro_batch=4 // before) == moved
    assert logged(moved, "loss") == pytest.approx(logged(straight, "loss"), rel=1e-5)
    ours, theirs = load_draft(moved / "draft"), load_draft(straight / "draft")
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name], atol=1e-5, rtol=1e-4)
    left = [path.name for path in (moved / "state").iterdir() if "universal" in path.name]
    assert not left and json.loads((moved / "run.json").read_text())["processes"] == before


@pytest.mark.slow
def test_features_of_a_pipelined_target_train_the_same_draft(tmp_path):
    """The target's layers over two processes, taps on both sides of the cut, against the whole target in each. The
    judge replays through the pipeline what it replays with the whole target.
    """
    answers = tmp_path / "answers.jsonl"
    ids = [4, 8, 15, 16, 23, 42, 99, 7, 4, 8, 15, 16, 23, 42]
    answers.write_text(json.dumps({"token_ids": ids, "answer_start": 4}) + "\n")
    common = {"micro_batch": 1, "accumulate": 2, "judge": {"judge": "replay", "answers": str(answers)}}
    whole = run(tmp_path, 2, "whole", **common)
    spread = run(tmp_path, 2, "spread", features={"stages": 2, "capture_rows": 1}, **common)
    assert logged(spread, "loss") == pytest.approx(logged(whole, "loss"), rel=1e-6)
    ours, theirs = load_draft(spread / "draft"), load_draft(whole / "draft")
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name], atol=1e-6, rtol=1e-5)
    judged = [json.loads((run / "run.json").read_text())["best"] for run in (spread, whole)]
    assert judged[0]["al"] == judged[1]["al"] >= 1 and judged[0]["replayed"]
