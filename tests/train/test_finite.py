"""A batch whose loss or gradient is not finite is left out and counted, on all ranks together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from target_model.errors import UserError
from train.config import parse_config
from train.features import OnlineCapture
from train.loop import train

SCRIPT = """
import sys, json
from pathlib import Path
from tests.train.test_finite import poison, run_config
from train.features import OnlineCapture
from train.loop import train
OnlineCapture.features = poison(OnlineCapture.features, "aux", {2})
config = run_config(Path(sys.argv[1]), "two", 2, micro_batch=1)
train(config, progress=False)
"""


def run_config(directory: Path, name: str, stage: int, *, micro_batch: int = 2, **changes):
    data = directory / "rows.jsonl"
    if not data.exists():
        texts = ["x = 1\nprint(x)\n", "for i in range(9):\n    print(i)\n", "import os\nos.getcwd()\n"]
        data.write_text("".join(json.dumps({"text": text * (1 + i)}) + "\n" for i, text in enumerate(texts)))
    values = {
        "name": name,
        "output": str(directory / "runs"),
        "data": {"path": str(data), "sequence_length": 32},
        "draft": {"intermediate_size": 64},
        "ttt": {"steps": 2},
        "schedule": {"steps": 4},
        "engine": {
            "device": "cpu",
            "dtype": "float32",
            "micro_batch": micro_batch,
            "zero_stage": stage,
            "threads": 1,
        },
        "checkpoint": {"export_dtype": "float32"},
        "log": {"every": 1},
    }
    for section, fields in changes.items():
        values[section] = values.get(section, {}) | fields
    return parse_config(values)


def poison(original, field: str, calls: set[int]):
    """`OnlineCapture.features`, whose results of the given calls (from 1) hold a number that is not finite."""
    count = 0

    def features(self, indices):
        nonlocal count
        count += 1
        result = original(self, indices)
        if count in calls and os.environ.get("RANK", "0") == "0":
            vars(result)[field][0, 3, 5] = float("nan")
        return result

    return features


def log_of(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_bad_batch_is_skipped_and_counted(tmp_path, monkeypatch, stage, dtype):
    """NaN among the taps reaches the gradient, among the final states the loss."""
    monkeypatch.setattr(OnlineCapture, "features", poison(OnlineCapture.features, "aux", {2}))
    result = train(run_config(tmp_path, "aux", stage, engine={"dtype": dtype}), progress=False)
    log = log_of(result.directory)
    assert [line["skipped"] for line in log] == [0, 1, 1, 1]
    assert ["loss" in line for line in log] == [True, False, True, True]
    assert all(torch.tensor(line["loss"]).isfinite() for line in log if "loss" in line)


def test_weights_and_moments_stay_as_they_were(tmp_path, monkeypatch):
    """A step that is skipped leaves exactly what the step before it left; the count survives a resume."""
    before = train(run_config(tmp_path, "before", 0, schedule={"steps": 1, "warmup": 0}), progress=False)
    monkeypatch.setattr(OnlineCapture, "features", poison(OnlineCapture.features, "final_state", {2}))
    config = run_config(tmp_path, "after", 0, schedule={"steps": 4, "warmup": 0})
    after = train(config, progress=False, stop=(2).__eq__)
    states = [next((run.directory / "state").glob("*/mp_rank_00_model_states.pt")) for run in (before, after)]
    ours, theirs = (torch.load(path, weights_only=False) for path in states)
    for name, value in ours["module"].items():
        assert torch.equal(value, theirs["module"][name]), name
    moments = [saved["optimizer"]["state"] for saved in (ours, theirs)]
    assert all(torch.equal(moments[0][i]["exp_avg"], moments[1][i]["exp_avg"]) for i in moments[0])
    assert log_of(train(config, progress=False).directory)[-1]["skipped"] == 1


def test_many_in_a_row_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(OnlineCapture, "features", poison(OnlineCapture.features, "aux", {2, 3, 4}))
    with pytest.raises(UserError, match="not finite at step 3: lower optimizer.lr.*; 2 steps in a row were skipped"):
        train(run_config(tmp_path, "bad", 1, optimizer={"skip_limit": 2}), progress=False)


def test_the_stages_make_the_same_updates_in_bfloat16(tmp_path):
    """DeepSpeed's step without a batch, with which some stages start, neither counts for Adam nor decays weights."""
    losses = []
    for stage in (0, 1):
        change = {"optimizer": {"weight_decay": 0.5, "lr": 1e-3}, "schedule": {"steps": 4, "warmup": 0.0}}
        config = run_config(tmp_path, f"bf16-{stage}", stage, **change)
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"dtype": "bfloat16"})})
        train(config, progress=False)
        losses.append([line["loss"] for line in log_of(config.run_directory)])
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert losses[0][-1] < 0.9 * losses[0][0]


@pytest.mark.slow
def test_two_processes_skip_together(tmp_path):
    """Rank 0 alone sees the bad numbers; both leave the step out and end with the same weights."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    log = log_of(tmp_path / "runs" / "two")
    assert [line["skipped"] for line in log] == [0, 1, 1, 1]
