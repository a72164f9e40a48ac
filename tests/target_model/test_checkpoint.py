"""Strict loading: a damaged checkpoint never loads, and the message names what is wrong and where."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from target_model.checkpoint import load_target
from target_model.errors import UserError
from target_model.tensor_names import text_specs
from tests.fixtures import TINY_VISION, random_target, random_tensors, tiny_config, write_checkpoint

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
EXPERT = "language_model.model.layers.3.block_sparse_moe.experts.1.w3.weight"
GATE = "language_model.model.layers.3.block_sparse_moe.gate.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tiny_config(vision=TINY_VISION), tmp_path / "target")


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Applies a change to the tensors of every shard and lists in the index what is then there."""
    weight_map = {}
    for file in (FIRST, SECOND):
        tensors = load_file(directory / file)
        change(tensors)
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def failure(directory: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_target(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("language_only", [True, False])
def test_every_tensor_arrives_where_it_belongs(checkpoint: Path, language_only: bool):
    """The model holds exactly what the files hold, and each element of it was written once."""
    model = load_target(checkpoint, language_only=language_only)
    assert (model.vision is None) == language_only
    parameters = dict(model.named_parameters())
    written = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for spec, tensor in random_tensors(tiny_config(vision=TINY_VISION)):
        if language_only and spec.is_vision:
            continue
        value, count = parameters[spec.destination], written[spec.destination]
        if spec.expert is not None:
            value, count = value[spec.expert], count[spec.expert]
        if spec.rows is not None:
            value, count = value[spec.rows[0] : spec.rows[1]], count[spec.rows[0] : spec.rows[1]]
        expected = tensor.float() + 1 if spec.kind == "norm" else tensor.float()
        assert torch.equal(value, expected.expand_as(value)), spec.name
        count += 1
    for name, count in written.items():
        assert bool((count == 1).all()), name


def test_directory_equals_memory(checkpoint: Path):
    loaded, built = load_target(checkpoint, language_only=False), random_target(vision=TINY_VISION, language_only=False)
    for (name, mine), (_, other) in zip(loaded.named_parameters(), built.named_parameters(), strict=True):
        assert torch.equal(mine, other), name


def test_bf16_keeps_router_and_norms_in_fp32(checkpoint: Path):
    model = load_target(checkpoint, dtype=torch.bfloat16)
    fp32 = {name for name, value in model.named_parameters() if value.dtype == torch.float32}
    assert {name.rsplit(".", 1)[-1] for name in fp32} == {
        "gate",
        "gate_bias",
        "scale",
        "attention_scale",
        "mlp_scale",
        "head_scale",
    }
    assert model.dtype == torch.bfloat16
    ids = torch.arange(60).view(2, 30)
    final, _ = model.capture(ids, (1, 3, 5))
    reference, _ = load_target(checkpoint).capture(ids, (1, 3, 5))
    assert final.dtype == torch.bfloat16
    assert (final.float() - reference).abs().median() < 0.05


def test_a_single_file_without_index(checkpoint: Path):
    tensors = load_file(checkpoint / FIRST) | load_file(checkpoint / SECOND)
    for name in (FIRST, SECOND, "model.safetensors.index.json"):
        (checkpoint / name).unlink()
    assert f"{checkpoint / 'model.safetensors'} is missing" in failure(checkpoint)
    save_file(tensors, checkpoint / "model.safetensors")
    assert torch.equal(load_target(checkpoint).lm_head.weight, random_target(vision=TINY_VISION).lm_head.weight)


def test_text_only_copy_and_mtp(checkpoint: Path):
    """Vision tensors may be absent altogether, and MTP tensors may be present."""

    def text_only(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if not name.startswith("language_model.")]:
            del tensors[name]
        tensors[f"mtp.{len(tensors)}.weight"] = torch.zeros(2)

    rewrite(checkpoint, text_only)
    assert len(list(text_specs(tiny_config()))) > 0
    for language_only in (True, False):
        assert load_target(checkpoint, language_only=language_only).vision is None


@pytest.mark.parametrize("name", [EXPERT, GATE, "language_model.lm_head.weight", "multi_modal_projector.linear_1.bias"])
def test_missing_tensor(checkpoint: Path, name: str):
    rewrite(checkpoint, lambda tensors: tensors.pop(name, None))
    assert f"tensor {name} is missing from the checkpoint in {checkpoint}" in failure(checkpoint)


def test_several_missing_tensors(checkpoint: Path):
    rewrite(checkpoint, lambda tensors: [tensors.pop(name) for name in list(tensors) if "experts.1." in name])
    assert "(and 11 more) is missing" in failure(checkpoint)


@pytest.mark.parametrize("name", ["language_model.model.layers.6.input_layernorm.weight", "vision_tower.extra"])
def test_unknown_tensor(checkpoint: Path, name: str):
    rewrite(checkpoint, lambda tensors: tensors.update({name: torch.zeros(64)} if EXPERT in tensors else {}))
    message = failure(checkpoint)
    assert f"unknown tensor {name} in {checkpoint}" in message and ".safetensors" in message


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (EXPERT, torch.zeros(32, 63), "has shape [32, 63], the config asks for [32, 64]"),
        (EXPERT, torch.zeros(32, 64, dtype=torch.uint8), "is U8, it must be BF16 or F16 or F32"),
        (GATE, torch.zeros(4, 64, dtype=torch.bfloat16), "is BF16, it must be F32"),
        ("patch_merge_mlp.linear_2.bias", torch.zeros(65), "has shape [65], the config asks for [64]"),
    ],
)
def test_wrong_shape_or_type(checkpoint: Path, name: str, value: Tensor, message: str):
    rewrite(checkpoint, lambda tensors: tensors.update({name: value} if name in tensors else {}))
    text = failure(checkpoint)
    assert f"tensor {name} in {checkpoint}" in text and message in text


def test_missing_shard(checkpoint: Path):
    (checkpoint / SECOND).unlink()
    listed = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    first = next(name for name, file in listed.items() if file == SECOND)
    assert failure(checkpoint) == f"shard {checkpoint / SECOND} is missing (tensor {first} and others)"


@pytest.mark.parametrize("keep", [0, 7, 200, -100])
def test_truncated_shard(checkpoint: Path, keep: int):
    path = checkpoint / FIRST
    content = path.read_bytes()
    path.write_bytes(content[:keep])
    assert failure(checkpoint).startswith(f"{path} is corrupt or truncated")


def test_overwritten_header(checkpoint: Path):
    path = checkpoint / SECOND
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])
    assert failure(checkpoint).startswith(f"{path} is corrupt or truncated")


def test_index_and_shards_disagree(checkpoint: Path):
    path = checkpoint / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    moved = dict(index["weight_map"])
    moved[EXPERT] = FIRST if moved[EXPERT] == SECOND else SECOND
    path.write_text(json.dumps({"weight_map": moved}))
    assert f"tensor {EXPERT} is missing from {checkpoint / moved[EXPERT]}" in failure(checkpoint)
    path.write_text("{}")
    assert failure(checkpoint).startswith(f"{path} is not a safetensors index")


def test_a_tensor_in_two_shards(checkpoint: Path):
    tensors = load_file(checkpoint / FIRST)
    name = next(iter(tensors))
    save_file(load_file(checkpoint / SECOND) | {name: tensors[name]}, checkpoint / SECOND)
    assert failure(checkpoint).startswith(f"tensor {name} stands in both")


def test_total_size_is_not_trusted(checkpoint: Path):
    """The fixture's index says 1 byte, as the published one says 15 GB too many."""
    assert json.loads((checkpoint / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == 1
    load_target(checkpoint)
