"""Two processes, over gloo or on two GPUs over NCCL, compute what one does, whatever the ZeRO stage."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from draft_model.checkpoint import load_draft
from tests.devices import CPU_AND_TWO_GPUS

SCRIPT = """
import json, os, sys
from train.config import parse_config
from train.loop import train
config, stop = parse_config(json.loads(sys.argv[1])), int(sys.argv[2])
train(config, judge=lambda draft, target: {"al": float(sys.argv[3])}, progress=False,
      stop=lambda step: step == stop and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1)  # one is enough
"""
# What other orders of summing make of losses and gradient norms, relative; and of weights, absolute and relative: Adam
# makes a whole step of a gradient that is nothing but rounding. SAME: nothing is divided otherwise.
NOISE = {"cpu": (1e-5, 1e-4, 1e-5, 1e-4), "cuda": (1e-4, 1e-3, 4e-4, 1e-3)}
SAME = {"cpu": (1e-6, 1e-5, 1e-6, 1e-5), "cuda": NOISE["cuda"]}


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
    al: str = "1.0",
    wait: bool = True,
    **engine,
):
    """The run's folder, or without `wait` the processes that have been started."""
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
    command = [*launcher, str(script), json.dumps(config), str(stop), al]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    if not wait:
        # Without the launcher: what it had started would outlive its own death.
        return _start([sys.executable, *command[len(launcher) :]], environment, processes)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return tmp_path / "runs" / name


def _start(command: list[str], environment: dict[str, str], processes: int) -> list[subprocess.Popen]:
    """Every rank, each in a group of its own that is killed whole."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    started = []
    for rank in map(str, range(processes)):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(processes), **meeting}
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started.append(subprocess.Popen(command, env=environment | place, start_new_session=True, **silent))
    return started


def logged(directory: Path, key: str) -> list[float]:
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if "loss" in line]


def equal(ours: Path, theirs: Path, noise: tuple[float, ...], *, norms: bool = False) -> None:
    """Losses and drafts of two runs; with `norms` the norms of gradients, too, of which Adam forgives a wrong size."""
    loss, norm, absolute, relative = noise
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), rel=loss)
    if norms:
        assert logged(ours, "grad_norm") == pytest.approx(logged(theirs, "grad_norm"), rel=norm)
    expected = load_draft(theirs / "draft").state_dict()
    for name, value in load_draft(ours / "draft").state_dict().items():
        torch.testing.assert_close(value, expected[name], atol=absolute, rtol=relative)


@pytest.mark.parametrize("device", CPU_AND_TWO_GPUS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_processes_equal_one(tmp_path, stage, device):
    alone = run(tmp_path, 1, zero_stage=min(stage, 1), device=device)
    shared = run(tmp_path, 2, zero_stage=stage, device=device)
    equal(shared, alone, NOISE[device], norms=stage >= 1)
    if stage >= 1:
        # Each rank's file holds half of the optimizer state: fp32 masters (and moments) of 1.57 M trained parameters.
        files = sorted((shared / "state" / "step-00000004").glob("*optim_states.pt"))
        assert len(files) == 2 and all(path.stat().st_size < 0.75 * 12 * 1.6e6 for path in files)


@pytest.mark.parametrize("device", CPU_AND_TWO_GPUS)
def test_an_error_of_one_process_ends_all(tmp_path, device):
    """The judge's, which the first process has alone while the other waits for its result."""
    with pytest.raises(AssertionError, match="could not convert string to float|exitcode"):
        run(tmp_path, 2, zero_stage=1, device=device, al="no number")


@pytest.mark.parametrize("device", CPU_AND_TWO_GPUS)
def test_a_killed_run_goes_on(tmp_path, device):
    """kill -9 behind the first checkpoint, in mid-epoch and with packing; then the same command again. Bit for bit on a
    CPU; a GPU adds up in any order.
    """
    ranks = 1 if device == "cpu" else 2
    settings = {"zero_stage": 1, "checkpoint_every": 2, "packing": True, "device": device}
    straight = run(tmp_path, ranks, "straight", stop=8, steps=8, **settings)
    processes = run(tmp_path, ranks, "killed", stop=8, steps=8, wait=False, **settings)
    state = tmp_path / "runs" / "killed" / "state"
    deadline = time.monotonic() + 120
    while not list(state.glob("step-0000000[24]")) and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert logged(state.parent, "step")[-1] < 8
    killed = run(tmp_path, ranks, "killed", stop=8, steps=8, **settings)
    equal(killed, straight, NOISE[device])
    if device == "cpu":
        assert logged(killed, "loss") == logged(straight, "loss")
        ours, theirs = (load_draft(directory / "draft").state_dict() for directory in (killed, straight))
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize("device", CPU_AND_TWO_GPUS)
@pytest.mark.parametrize(("stage", "before", "after"), [(2, 2, 1), (3, 1, 2)])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, stage, before, after, device):
    """Same rows in a step, weights, moments and schedule: the losses and the draft are those of one run."""
    straight = run(tmp_path, 1, "straight", zero_stage=1, device=device)
    settings = {"zero_stage": stage, "micro_batch": 4 // before, "device": device}
    moved = run(tmp_path, before, "moved", stop=2, **settings)
    assert run(tmp_path, after, "moved", **settings) == moved
    equal(moved, straight, NOISE[device])
    left = [path.name for path in (moved / "state").iterdir() if "universal" in path.name]
    assert not left and json.loads((moved / "run.json").read_text())["processes"] == before


@pytest.mark.parametrize("device", CPU_AND_TWO_GPUS)
def test_features_of_a_pipelined_target_train_the_same_draft(tmp_path, device):
    """The target's layers over two processes, taps on both sides of the cut, against the whole target in each. The
    judge replays through the pipeline what it replays with the whole target.
    """
    answers = tmp_path / "answers.jsonl"
    ids = [4, 8, 15, 16, 23, 42, 99, 7, 4, 8, 15, 16, 23, 42]
    answers.write_text(json.dumps({"token_ids": ids, "answer_start": 4}) + "\n")
    judge = {"judge": "replay", "answers": str(answers)}
    common = {"micro_batch": 1, "accumulate": 2, "judge": judge, "device": device}
    whole = run(tmp_path, 2, "whole", **common)
    spread = run(tmp_path, 2, "spread", features={"stages": 2, "capture_rows": 1}, **common)
    equal(spread, whole, SAME[device])
    judged = [json.loads((run / "run.json").read_text())["best"] for run in (spread, whole)]
    assert judged[0]["al"] == judged[1]["al"] >= 1 and judged[0]["replayed"]
