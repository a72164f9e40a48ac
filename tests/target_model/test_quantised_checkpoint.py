"""Quantised checkpoints: written by `spec quantize`, read in every published style, refused where they contradict
themselves.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from target_model.checkpoint import load_target
from target_model.errors import UserError
from target_model.format_coverage import checkpoint_bytes, parameter_formats
from target_model.model import TargetModel
from target_model.quantise_checkpoint import quantise_checkpoint
from target_model.quantised import QuantisedWeight
from target_model.quantised_formats import FP8, MXFP4, MXFP8, NVFP4, dequantise, quantise
from target_model.sizes import weight_bytes
from tests.fixtures import TINY_VISION, tiny_config, write_checkpoint

LAYER = "language_model.model.layers.3."
EXPERT = f"{LAYER}block_sparse_moe.experts.1.w1"
FIRST = "model-00001-of-00002.safetensors"
NAMES = ("mxfp8", "mxfp4", "nvfp4")
IDS = torch.arange(60).view(2, 30)
BYTES = torch.ones(32, 64, dtype=torch.uint8)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tiny_config(vision=TINY_VISION), tmp_path_factory.mktemp("plain") / "target")


@pytest.fixture(scope="module")
def quantised(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("quantised")
    for name in NAMES:
        quantise_checkpoint(str(plain), root / name, name)
    return {name: root / name for name in NAMES}


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def rewritten(source: Path, destination: Path, change: Callable[[dict[str, Tensor]], None], **settings: object) -> Path:
    """A copy in one file with changed tensors and, unless None, changed settings of quantization_config."""
    tensors, document = tensors_of(source), json.loads((source / "config.json").read_text())
    change(tensors)
    document["quantization_config"] |= settings
    destination.mkdir()
    save_file(tensors, destination / "model.safetensors")
    (destination / "config.json").write_text(json.dumps(document))
    return destination


def widen_files(source: Path, destination: Path) -> Path:
    """The checkpoint with every quantised weight as plain fp32, worked out here from the published layout."""
    tensors, document = tensors_of(source), json.loads((source / "config.json").read_text())
    for name in [name for name in tensors if name.rsplit(".", 1)[-1] in ("weight_scale", "weight_scale_inv")]:
        module, scale = name.rsplit(".", 1)[0], tensors.pop(name)
        weight = tensors[f"{module}.weight"]
        numbers = weight.float()
        if weight.dtype == torch.uint8:
            table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
            numbers = torch.stack((table[weight.int() & 15], table[weight.int() >> 4]), -1).flatten(-2)
        factors = 2.0 ** (scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
        if f"{module}.weight_scale_2" in tensors:
            factors = factors * tensors.pop(f"{module}.weight_scale_2")
            tensors.pop(f"{module}.input_scale")
        group = numbers.shape[-1] // factors.shape[-1]
        tensors[f"{module}.weight"] = numbers * factors.repeat_interleave(group, -1)
    del document["quantization_config"]
    destination.mkdir()
    save_file(tensors, destination / "model.safetensors")
    (destination / "config.json").write_text(json.dumps(document))
    return destination


def states(model: TargetModel) -> Tensor:
    return model.capture(IDS, (1, 3, 5))[0]


@pytest.mark.parametrize("name", NAMES)
def test_model_equals_its_widened_checkpoint(quantised: dict[str, Path], tmp_path: Path, name: str):
    """Quantised in memory gives what plain weights of the same values give, and stays quantised."""
    model = load_target(quantised[name], language_only=False)
    assert torch.allclose(
        states(model), states(load_target(widen_files(quantised[name], tmp_path / "plain"))), atol=1e-5
    )
    experts = model.layers[3].mlp
    expected = {"mxfp8": MXFP8, "mxfp4": MXFP4, "nvfp4": NVFP4}[name]
    assert experts.w13.form == experts.w2.form == expected
    assert isinstance(model.layers[0].attention.packed, QuantisedWeight) == (name != "mxfp4")
    assert all(not isinstance(module, QuantisedWeight) for module in model.vision.modules())
    config = tiny_config(vision=TINY_VISION)
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    assert held == weight_bytes(config, 4, language_only=False, formats=parameter_formats(config, name))


@pytest.mark.parametrize("name", NAMES)
def test_written_layout(plain: Path, quantised: dict[str, Path], name: str):
    """Same shards, published names and types, an index that is right, and everything else as it was."""
    before, after = tensors_of(plain), tensors_of(quantised[name])
    index = json.loads((quantised[name] / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys()
    total = sum(tensor.numel() * tensor.element_size() for tensor in after.values())
    assert index["metadata"]["total_size"] == total == checkpoint_bytes(tiny_config(vision=TINY_VISION), name)
    assert after[f"{EXPERT}.weight"].shape == ((32, 64) if name == "mxfp8" else (32, 32))
    types = {tensor: after[tensor].dtype for tensor in after if tensor.startswith(EXPERT)}
    assert (
        types
        == {
            "mxfp8": {f"{EXPERT}.weight": torch.float8_e4m3fn, f"{EXPERT}.weight_scale_inv": torch.uint8},
            "mxfp4": {f"{EXPERT}.weight": torch.uint8, f"{EXPERT}.weight_scale": torch.uint8},
            "nvfp4": {
                f"{EXPERT}.weight": torch.uint8,
                f"{EXPERT}.weight_scale": torch.float8_e4m3fn,
                f"{EXPERT}.weight_scale_2": torch.float32,
                f"{EXPERT}.input_scale": torch.float32,
            },
        }[name]
    )
    for untouched in ("language_model.lm_head.weight", f"{LAYER}block_sparse_moe.gate.weight"):
        assert torch.equal(before[untouched], after[untouched])
    excluded = load_config(quantised[name])
    assert "language_model.lm_head" in excluded and EXPERT not in excluded
    if name == "nvfp4":
        gate, up = (after[f"{LAYER}block_sparse_moe.experts.1.{w}.weight_scale_2"] for w in ("w1", "w3"))
        assert torch.equal(gate, up)


def load_config(directory: Path) -> list[str]:
    section = json.loads((directory / "config.json").read_text())["quantization_config"]
    return next(section[name] for name in ("ignored_layers", "exclude", "ignore") if name in section)


def test_packed_style_equals_the_other(quantised: dict[str, Path], tmp_path: Path):
    """compressed-tensors' names, with the reciprocal of the tensor's scale."""

    def rename(tensors: dict[str, Tensor]) -> None:
        for module in [name.removesuffix(".weight_scale_2") for name in tensors if name.endswith(".weight_scale_2")]:
            tensors[f"{module}.weight_packed"] = tensors.pop(f"{module}.weight")
            tensors[f"{module}.weight_global_scale"] = 1 / tensors.pop(f"{module}.weight_scale_2").reshape(1)
            tensors[f"{module}.input_global_scale"] = 1 / tensors.pop(f"{module}.input_scale").reshape(1)

    copy = rewritten(
        quantised["nvfp4"], tmp_path / "packed", rename, quant_method="compressed-tensors", quant_algo=None
    )
    model, other = load_target(copy), load_target(quantised["nvfp4"])
    assert model.layers[3].mlp.w13.form.name == "nvfp4-packed"
    assert torch.allclose(states(model), states(other), atol=1e-5)


@pytest.mark.parametrize("style", ["mxfp8", "rows", "column", "one"])
def test_mxfp4_with_attention_in_fp8(quantised: dict[str, Path], tmp_path: Path, style: str):
    """Beside MXFP4 experts: as MXFP8, or e4m3 with a number for each row ([N] or [N, 1]) or for all of them."""
    scales = {"rows": (-1,), "column": (-1, 1)}
    plain, expected = tensors_of(quantised["mxfp4"]), {}

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if re.match(r"language_model.*self_attn.*_proj.weight", name)]:
            weight, scale_name = tensors[name].float(), name.removesuffix("weight") + "weight_scale"
            if style == "mxfp8":
                packed = quantise(MXFP8, weight)
                tensors[name], tensors[scale_name] = packed.values, packed.scale
                expected[name] = dequantise(MXFP8, packed.values, packed.scale, None)
                continue
            largest = weight.abs().amax() if style == "one" else weight.abs().amax(-1, keepdim=True)
            scale = (largest / 448).bfloat16().float()
            tensors[name] = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors[scale_name] = scale if style == "one" else scale.reshape(scales[style])
            expected[name] = tensors[name].float() * scale

    settings = json.loads((quantised["mxfp4"] / "config.json").read_text())["quantization_config"]
    excluded = [module for module in settings["exclude"] if "self_attn" not in module]
    model = load_target(rewritten(quantised["mxfp4"], tmp_path / "mixed", change, exclude=excluded))
    packed = model.layers[3].attention.packed
    assert packed.form == (MXFP8 if style == "mxfp8" else FP8) and model.layers[3].mlp.w13.form == MXFP4
    assert model.layers[3].attention.out.form == packed.form

    def widen(tensors: dict[str, Tensor]) -> None:
        tensors |= expected

    wide = load_target(rewritten(quantised["mxfp4"], tmp_path / "wide", widen))
    assert torch.equal(packed.dequantised(slice(None), torch.float32), wide.layers[3].attention.packed)
    assert (
        torch.allclose(states(model), states(wide), atol=1e-5) and plain.keys() < tensors_of(tmp_path / "mixed").keys()
    )


def test_excluded_modules(plain: Path, tmp_path: Path):
    """What is excluded stays bf16 on disk; a parameter that packs both kinds is kept plain, with the same values."""
    patterns = ("*.index_k_proj", "*.layers.4.block_sparse_moe.experts.2.*")
    quantise_checkpoint(str(plain), tmp_path / "partly", "mxfp8", exclude=patterns)
    tensors, before = tensors_of(tmp_path / "partly"), tensors_of(plain)
    name = f"{LAYER}self_attn.index_k_proj.weight"
    assert torch.equal(tensors[name], before[name])
    model = load_target(tmp_path / "partly")
    assert not isinstance(model.layers[3].attention.packed, QuantisedWeight)
    assert isinstance(model.layers[3].attention.out, QuantisedWeight)
    assert not isinstance(model.layers[4].mlp.w13, QuantisedWeight)
    rows = model.layers[3].attention.packed[:64]
    scale = tensors[f"{LAYER}self_attn.q_proj.weight_scale_inv"]
    assert torch.equal(rows, dequantise(MXFP8, tensors[f"{LAYER}self_attn.q_proj.weight"], scale, None))
    assert torch.allclose(
        states(model), states(load_target(widen_files(tmp_path / "partly", tmp_path / "w"))), atol=1e-5
    )


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("name", "change", "settings", "message"),
    [
        ("mxfp8", drop(f"{EXPERT}.weight_scale_inv"), {}, f"tensor {EXPERT}.weight_scale of {EXPERT}.weight in"),
        ("mxfp8", put(f"{EXPERT}.weight_scale_inv", torch.ones(1, 1)), {}, "no format that can be read"),
        ("mxfp4", put(f"{EXPERT}.weight_scale", BYTES[:, :3].clone()), {}, "[32, 3], the config asks for [32, 2]"),
        ("mxfp4", put(f"{EXPERT}.weight", BYTES), {}, "[32, 64], the config asks for [32, 32]"),
        ("nvfp4", drop(f"{EXPERT}.weight_scale_2"), {}, "no format that can be read"),
        ("nvfp4", put(f"{EXPERT}.input_scale", torch.ones(2)), {}, f"{EXPERT}.input_scale in"),
        ("mxfp4", put(f"{EXPERT}.zero_point", torch.ones(2)), {}, f"unknown tensor {EXPERT}.zero_point"),
        ("mxfp8", lambda t: None, {"ignored_layers": [EXPERT]}, f"quantization_config excludes {EXPERT}"),
        ("mxfp8", lambda t: None, {"ignored_layers": ["re:.*experts.*"]}, "quantization_config excludes"),
        ("mxfp8", lambda t: None, {"ignored_layers": ["model.layers.3"]}, "quantization_config excludes"),
        ("mxfp8", lambda t: None, {"quant_method": "mxfp4"}, "stored as mxfp8, but quantization_config says mxfp4"),
        ("nvfp4", lambda t: None, {"quantized_layers": {EXPERT: {"quant_algo": "MXFP8"}}}, "says mxfp8"),
        ("nvfp4", lambda t: None, {"quantized_layers": {EXPERT: {"quant_algo": "W4A8"}}}, "'W4A8': only"),
        ("mxfp8", lambda t: None, {"quant_method": "gptq"}, "quant_method 'gptq' is not supported"),
        ("mxfp8", lambda t: None, {"weight_block_size": [128, 128]}, "weight_block_size [128, 128]"),
        ("mxfp8", lambda t: None, {"quant_method": "fp8", "weight_block_size": None}, "weight_block_size None"),
    ],
)  # fmt: skip
def test_contradictions(
    quantised: dict[str, Path], tmp_path: Path, name: str, change: Callable, settings: dict, message: str
):
    directory = rewritten(quantised[name], tmp_path / "broken", change, **settings)
    with pytest.raises(UserError) as caught:
        load_target(directory)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_quantised_without_a_config_section(quantised: dict[str, Path], tmp_path: Path):
    directory = rewritten(quantised["mxfp8"], tmp_path / "bare", lambda tensors: None)
    document = json.loads((directory / "config.json").read_text())
    del document["quantization_config"]
    (directory / "config.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="config.json has no quantization_config|unknown tensor .*weight_scale_inv"):
        load_target(directory)


def test_refusals_of_quantising(plain: Path, quantised: dict[str, Path], tmp_path: Path):
    for source, destination, name, message in (
        (quantised["mxfp4"], tmp_path / "a", "mxfp8", "is quantised already"),
        (plain, plain, "mxfp8", "exists already"),
        (plain, tmp_path / "a", "int4", "format 'int4' .* one of mxfp8, mxfp4, nvfp4$"),
        (plain, tmp_path / "a", "bf16", "format 'bf16' .* one of mxfp8, mxfp4, nvfp4$"),
    ):
        with pytest.raises(UserError, match=message):
            quantise_checkpoint(str(source), destination, name)
    assert not (tmp_path / "a").exists()


def test_a_glob_that_matches_nothing(plain: Path, tmp_path: Path):
    with pytest.raises(UserError, match="'no.such.\\*' matches no module of"):
        quantise_checkpoint(str(plain), tmp_path / "a", "mxfp8", exclude=("*.index_k_proj", "no.such.*"))
    assert not (tmp_path / "a").exists()


def test_a_full_disk_is_told_in_sizes_that_can_be_read(plain: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=rf"/a needs [0-9.]+ MB, but the disk of {tmp_path} has 0.00 MB free"):
        quantise_checkpoint(str(plain), tmp_path / "a", "mxfp8")


def test_interrupted_quantising_leaves_nothing(plain: Path, tmp_path: Path):
    def interrupt(done: int, total: int) -> None:
        if done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantise_checkpoint(str(plain), tmp_path / "half", "mxfp4", advance=interrupt)
    assert list(tmp_path.iterdir()) == []
