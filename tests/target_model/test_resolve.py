"""Names of targets, and the one sentence that says why a target cannot be had."""

import socket
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

import target_model.memory
import target_model.resolve
from target_model.checkpoint import load_target
from target_model.errors import UserError
from target_model.memory import gpus_needed, requirements
from target_model.resolve import known_targets, resolve_target, target_config
from tests.fixtures import tiny_config, write_checkpoint


@pytest.fixture
def empty_hub(monkeypatch, tmp_path: Path) -> Path:
    """An empty hub cache on a machine that could take a download: room, memory, and leave to go online."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(target_model.resolve, "largest_memory", lambda: 10**12)
    usage = type("Usage", (), {"free": 10**12})
    monkeypatch.setattr(target_model.resolve.shutil, "disk_usage", lambda path: usage)

    def unreachable(*args, **kwargs):
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    return tmp_path / "hub"


def test_bundled_and_directory(tmp_path: Path):
    bundled = resolve_target("m3-tiny")
    assert bundled.name == "m3-tiny" and bundled.config.vocab_size == 4096
    directory = write_checkpoint(tiny_config(), tmp_path / "mine")
    resolved = resolve_target(str(directory))
    assert resolved.name == "mine" and resolved.path == directory and resolved.config == tiny_config()


def test_unknown_names():
    with pytest.raises(UserError, match="unknown target 'm3-huge'"):
        resolve_target("m3-huge")
    assert known_targets() == ["m3-tiny", "MiniMax-M3"]


@pytest.mark.parametrize("name", ["MiniMax-M3", "MiniMaxAI/MiniMax-M3"])
def test_no_network(empty_hub: Path, name: str):
    with pytest.raises(UserError) as caught:
        resolve_target(name)
    message = str(caught.value)
    assert message == (
        f"the weights of MiniMax-M3 are not in the hub cache {empty_hub} and https://huggingface.co cannot be reached; "
        "MiniMax-M3 needs 854.2 GB on disk and, in bf16, 852.4 GB of GPU memory plus 134.25 KiB per token of context "
        "(recipe minimax-m3; GPUs: 16 x 80 GB, 8 x 141 GB, 8 x 192 GB)"
    )


@pytest.mark.parametrize(
    ("module", "attribute", "value", "problem"),
    [
        (constants, "HF_HUB_OFFLINE", True, "HF_HUB_OFFLINE forbids a download"),
        (
            target_model.resolve.shutil,
            "disk_usage",
            lambda path: type("Usage", (), {"free": 5 * 10**9}),
            "its disk has only 5.0 GB free",
        ),
        (target_model.resolve, "largest_memory", lambda: 16 * 10**9, "has only 16.0 GB of memory to load them into"),
    ],
)
def test_other_obstacles(empty_hub: Path, monkeypatch, module, attribute: str, value, problem: str):
    monkeypatch.setattr(module, attribute, value)
    with pytest.raises(UserError, match=problem) as caught:
        resolve_target("MiniMax-M3")
    assert "854.2 GB on disk" in str(caught.value) and "\n" not in str(caught.value)


def test_a_cached_copy_is_used(empty_hub: Path, monkeypatch):
    """The hub's cache layout: refs/main names the snapshot."""
    repository = empty_hub / "models--MiniMaxAI--MiniMax-M3"
    snapshot = write_checkpoint(tiny_config(), repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    resolved = resolve_target("MiniMax-M3")
    assert (resolved.name, resolved.path.resolve()) == ("MiniMax-M3", snapshot.resolve())


def test_the_config_needs_no_weights(empty_hub: Path):
    assert target_config("MiniMax-M3").num_layers == 60
    assert target_config("m3-tiny").num_layers == 8


def test_too_little_memory(monkeypatch, tmp_path: Path):
    directory = write_checkpoint(tiny_config(), tmp_path / "mine")
    monkeypatch.setattr(target_model.memory, "_SMALL", 0)
    monkeypatch.setattr(target_model.memory, "_available_memory", lambda: 10**5)
    with pytest.raises(UserError, match="not enough memory on cpu") as caught:
        load_target(directory, dtype=torch.float32)
    assert "\n" not in str(caught.value)


def test_gpu_counts():
    assert [gpus_needed(852 * 10**9, size * 10**9) for size in (80, 141, 192, 1000)] == [16, 8, 8, 1]
    assert "134.25 KiB" in requirements("MiniMax-M3", target_config("MiniMax-M3"))
