"""A run's folder belongs to one process at a time, for as long as that lives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from target_model.errors import UserError
from train.config import parse_config
from train.lock import locked
from train.loop import train

HOLDER = """
import sys, time
from pathlib import Path
from train.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_in_the_folder_is_refused_until_the_first_is_gone(tmp_path):
    folder = tmp_path / "runs" / "mine"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            values = {"name": "mine", "output": str(folder.parent), "resume": False, "data": {"path": "bundled:demo"}}
            config = parse_config(values | {"schedule": {"steps": 1}, "engine": {"device": "cpu"}})
            with pytest.raises(UserError, match=f"run folder {folder} is in use: process {holder.pid} on .* trains in"):
                train(config, progress=False)
            assert [path.name for path in folder.iterdir()] == ["lock"]
        finally:
            holder.kill()
    with locked(folder):  # what the killed one left does not count
        assert (folder / "lock").read_text().startswith(f"process {os.getpid()} on ")
        (folder / "log.jsonl").touch()
    assert [path.name for path in folder.iterdir()] == ["log.jsonl"]


def test_a_run_that_did_not_begin_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="nowhere.jsonl does not exist"):
        values = {"name": "mine", "output": str(tmp_path), "data": {"path": "nowhere.jsonl"}, "schedule": {"steps": 1}}
        train(parse_config(values | {"engine": {"device": "cpu"}}), progress=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="run folder .*file cannot be made or locked"), locked(tmp_path / "file"):
        pass
