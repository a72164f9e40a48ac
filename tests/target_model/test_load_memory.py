"""Loading streams: beside the model itself, host memory never holds more than about one shard."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from target_model.checkpoint import load_target
from target_model.errors import UserError
from target_model.load_progress import LoadProgress
from target_model.quantise_checkpoint import quantise_checkpoint
from tests.fixtures import tiny_config, write_checkpoint

# Runs in its own process: peak memory is a property of a process. Prints bytes.
PROBE = """
import json, sys
import torch
from target_model.checkpoint import load_target
from target_model.shard_loading import load_shard
from target_model.sharding import Shard
from tests.fixtures import random_target

def kilobytes(field):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

random_target()  # whatever the first use of torch allocates
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
before = kilobytes("VmHWM")
if sys.argv[2] == "1":
    model = load_target(sys.argv[1], dtype=torch.bfloat16)
else:
    model = load_shard(sys.argv[1], Shard(1, int(sys.argv[2])), dtype=torch.bfloat16)
resident = sum(p.numel() * p.element_size() for p in model.parameters())
print(json.dumps({"grown": kilobytes("VmHWM") - before, "resident": resident}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("name", "parts"), [("bf16", 1), ("mxfp4", 1), ("bf16", 2)])
def test_peak_host_memory(tmp_path: Path, name: str, parts: int):
    """Also of a process that loads one of two parts."""
    config = tiny_config(hidden_size=1024, expert_width=512, num_experts=16, vocab_size=4000, num_layers=7)
    directory = write_checkpoint(config, tmp_path / "bf16", shards=8)
    if name != "bf16":
        quantise_checkpoint(str(directory), tmp_path / name, name)
    shards = [path.stat().st_size for path in (tmp_path / name).glob("*.safetensors")]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, "-c", PROBE, str(tmp_path / name), str(parts)]
    outcome = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, check=True)
    measured = json.loads(outcome.stdout)
    assert sum(shards) > 5 * max(shards)
    assert measured["resident"] <= measured["grown"] < measured["resident"] + 1.2 * max(shards)


def test_a_truncated_shard_names_its_tensor(tmp_path: Path):
    directory = write_checkpoint(tiny_config(), tmp_path / "target")
    path = directory / "model-00002-of-00002.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name, entry = sorted(header.items(), key=lambda item: item[1].get("data_offsets", [0])[0])[len(header) // 2]
    path.write_bytes(content[: 8 + length + entry["data_offsets"][1] - 1])
    with pytest.raises(UserError) as caught:
        load_target(directory)
    assert str(caught.value).startswith(f"{path} is corrupt or truncated: tensor {name} ends at byte ")


def test_progress(capsys: pytest.CaptureFixture[str]):
    """Silent for small loads; for large ones that nobody watches, one line with the speed."""
    with LoadProgress("small", 10**6) as progress:
        progress.advance(10**6)
    assert capsys.readouterr() == ("", "")
    with LoadProgress("large", 4 * 10**9) as progress:
        progress.advance(4 * 10**9)
    text = capsys.readouterr().err
    assert text.startswith("loaded large: 4.0 GB in ") and "GB/s)" in text
    assert progress.summary(2.0) == "loaded large: 4.0 GB in 2.0 s (2.00 GB/s)"
