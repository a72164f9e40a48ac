"""`spec inspect`: the published figures of MiniMax-M3, and checkpoints held against their config."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from spec.cli import app
from spec.inspect import run
from target_model.config import M3Config
from target_model.errors import UserError
from target_model.inspection import (
    CACHE_TYPES,
    cache_needs,
    format_needs,
    gpu_table,
    inspect_checkpoint,
    schedule,
    splits,
)
from target_model.quantise_checkpoint import quantise_checkpoint
from target_model.resolve import PUBLISHED_CONFIGS, target_config
from tests.fixtures import TINY_VISION, published_json, tiny_config, write_checkpoint

# Part -> billions of parameters, as published.
TABLE = {
    "routed experts": "413.122 B",
    "attention": "6.417 B",
    "shared expert": "3.228 B",
    "lm_head": "1.229 B",
    "embed_tokens": "1.229 B",
    "dense MLP": "0.679 B",
    "vision tower": "0.631 B",
    "projector + merge": "0.234 B",
    "indexer": "0.224 B",
    "router + norms": "0.046 B",
    "all": "427.040 B",
}
SECOND = "model-00002-of-00002.safetensors"


def printed(capsys: pytest.CaptureFixture[str], target: Path | str, good: bool = True) -> str:
    assert run(str(target)) == good
    return capsys.readouterr().out


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tiny_config(vision=TINY_VISION), tmp_path / "target")


def test_minimax_m3_from_its_config(capsys: pytest.CaptureFixture[str]):
    text = printed(capsys, "MiniMax-M3")
    for part, size in TABLE.items():
        assert re.search(rf"^{re.escape(part)} .*{re.escape(size)}", text, re.MULTILINE), part
    assert "24.733 B active" in text
    assert "22,893 text + 523 vision = 23,416" in text
    assert re.search(r"^bf16 +134\.25 ", text, re.MULTILINE) and re.search(r"^fp8 KV +74\.25 ", text, re.MULTILINE)
    assert "134.25 GiB" not in text and "from the config alone" in text
    assert "FFF" + "S" * 57 in text and "DDD" + "M" * 57 in text
    assert text == printed(capsys, PUBLISHED_CONFIGS["MiniMax-M3"]).replace(
        str(PUBLISHED_CONFIGS["MiniMax-M3"]), "MiniMax-M3"
    )


def test_bytes_of_formats():
    """Routed experts alone, by hand: 413.122e9 numbers in 4 bits plus one byte for 32 or 16 of them."""
    routed = 57 * 128 * 3 * 3072 * 6144
    shared = 57 * 3 * 3072 * 6144
    needs = {need.name: need for need in format_needs(target_config("MiniMax-M3"))}
    saved = needs["bf16"].checkpoint - needs["mxfp4"].checkpoint
    assert saved == (routed + shared) * 2 - (routed + shared) * 17 // 32
    from_mxfp8 = needs["mxfp8"].checkpoint - needs["nvfp4"].checkpoint
    assert from_mxfp8 == routed * 33 // 32 - routed * 9 // 16 - 57 * 128 * 3 * 8


def test_cache_and_gpus():
    config = target_config("MiniMax-M3")
    assert [need.target / 1024 for need in cache_needs(config)] == [134.25, 74.25, 67.125]
    assert cache_needs(config)[0].draft == 32 * 1024
    rows = {(name, cache): counts for name, cache, counts in gpu_table(config, CACHE_TYPES, (80 * 10**9, 141 * 10**9))}
    assert rows["bf16", "bf16"][1] == [8, 8, 16, 32]
    assert rows["mxfp4", "bf16"][1][0] == 2
    # A million tokens of the draft, 32 KiB each, and of one KV head with index K, 44.25 KiB, exceed 72 GB alone.
    assert rows["mxfp4", "bf16"][0] == [4, 8, 16, None]


def test_splits():
    """64 GPUs would cut groups of 32 columns of the shared expert."""
    config = target_config("MiniMax-M3")
    assert [split.gpus for split in splits(config, "bf16")] == [1, 2, 4, 8, 16, 32, 64]
    assert [split.gpus for split in splits(config, "mxfp4")] == [1, 2, 4, 8, 16, 32]


def test_schedule_shows_reuse():
    document = published_json(tiny_config())
    document["text_config"] |= {"use_index_cache": True, "index_topk_freq": 2}
    assert schedule(M3Config.from_json(document)) == [("attention", "FFSrSr"), ("MLP", "DDMMMM")]


def test_a_good_checkpoint(capsys: pytest.CaptureFixture[str], checkpoint: Path):
    text = printed(capsys, checkpoint)
    assert "this checkpoint loads" in text and "missing: 0" in text
    # The index of the fixture claims one byte.
    assert "the index claims 1 (untrusted), which is wrong" in text
    held = sum(t.numel() * t.element_size() for f in checkpoint.glob("*.safetensors") for t in load_file(f).values())
    assert f"bytes of all tensors: {held:,};" in text
    for file in checkpoint.glob("*.safetensors"):
        assert f"{file.stat().st_size:,}" in text


@pytest.mark.parametrize(("name", "stored"), [("mxfp8", "mxfp8"), ("nvfp4", "nvfp4")])
def test_a_quantised_checkpoint(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path, name: str, stored: str
):
    quantise_checkpoint(str(checkpoint), tmp_path / name, name)
    text = printed(capsys, tmp_path / name)
    assert re.search(rf"\d+ {stored}\b", text) and "which agrees" in text


def test_every_fault_is_listed(capsys: pytest.CaptureFixture[str], checkpoint: Path):
    """Not only the first one."""
    tensors = load_file(checkpoint / SECOND)
    first, second, third, fourth = sorted(tensors)[:4]
    tensors[f"{first}.more"] = tensors.pop(first)
    tensors["other"] = tensors.pop(second)
    tensors[third] = torch.zeros(3)
    tensors[fourth] = tensors[fourth].to(torch.int32)
    save_file(tensors, checkpoint / SECOND)
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    kept = {name: file for name, file in index["weight_map"].items() if file != SECOND}
    weight_map = {**kept, **dict.fromkeys(tensors, SECOND)}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    report = inspect_checkpoint(tiny_config(vision=TINY_VISION), checkpoint)
    assert sorted(report.missing) == [first, second]
    assert sorted(report.unknown) == sorted([f"{first}.more", "other"])
    assert len(report.problems) == 2 and any(third in line for line in report.problems)
    assert any(f"{fourth} in" in line and "is I32" in line for line in report.problems)
    text = printed(capsys, checkpoint, good=False)
    assert "this checkpoint does not load" in text and "missing: 2" in text and "unknown: 2" in text


def test_damage_names_file_and_tensor(capsys: pytest.CaptureFixture[str], checkpoint: Path):
    path = checkpoint / SECOND
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    text = printed(capsys, checkpoint, good=False)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    last = max((n for n in header if n[0] != "_"), key=lambda name: header[name]["data_offsets"][1])
    assert f"{path}: tensor {last} ends at byte {len(content)}, the file has {len(content) - 10}" in text
    path.unlink()
    assert f"{path}: this shard is missing" in printed(capsys, checkpoint, good=False)


def test_the_commands(checkpoint: Path, tmp_path: Path):
    """Exit codes, and that every option arrives."""
    runner, made = CliRunner(), tmp_path / "made"
    outcome = runner.invoke(
        app, ["quantize", str(checkpoint), str(made), "--format", "mxfp4", "--exclude", "*.layers.4.*"]
    )
    assert outcome.exit_code == 0 and re.search(r"made: [0-9.]+ MB, tensors: \d+ mxfp4, \d+ plain", outcome.output)
    excluded = json.loads((made / "config.json").read_text())["quantization_config"]["exclude"]
    assert "language_model.model.layers.4.block_sparse_moe.experts.0.w1" in excluded
    assert runner.invoke(app, ["inspect", str(made)]).exit_code == 0
    (made / "model-00001-of-00002.safetensors").unlink()
    assert runner.invoke(app, ["inspect", str(made)]).exit_code == 1


def test_unknown_names():
    with pytest.raises(UserError, match="unknown target 'M4'"):
        run("M4")
