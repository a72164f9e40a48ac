"""Random weights of any format and depth, made in place."""

import pytest
import torch

from target_model import dummy
from target_model.dummy import DummyWeights, check_without_storage, dummy_target
from target_model.errors import UserError
from target_model.format_coverage import FORMAT_NAMES, parameter_formats
from target_model.quantised import QuantisedWeight
from target_model.resolve import target_config
from target_model.sizes import weight_bytes
from tests.fixtures import tiny_config


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_model_that_runs(name: str):
    model = dummy_target("t", tiny_config(), name)
    assert isinstance(model.layers[3].mlp.w13, QuantisedWeight) == (name != "bf16")
    final, aux = model.capture(torch.arange(60).view(2, 30), (1, 3, 5))
    assert final.isfinite().all() and aux.isfinite().all()
    assert aux.std() < 100 and aux.std() > 0.1
    for module in model.modules():
        if isinstance(module, QuantisedWeight):
            index = 0 if len(module.shape) == 3 else slice(None)
            size = module.dequantised(index, torch.float32).std() * module.shape[-1] ** 0.5
            assert 0.6 < size < 1.6
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    assert held == check_without_storage(tiny_config(), name, torch.float32)
    again = dummy_target("t", tiny_config(), name)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True) if a.dim() == 1)
    assert torch.equal(again.capture(torch.arange(8)[None], ())[0], model.capture(torch.arange(8)[None], ())[0])


def test_the_whole_model_without_storage():
    """About 427 billion parameters less the vision side, in half a byte and a little each."""
    size = check_without_storage(target_config("MiniMax-M3"), "mxfp4")
    assert 240e9 < size < 242e9


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_sizes_from_the_table_are_those_of_the_model(name: str):
    config = target_config("MiniMax-M3")
    counted = weight_bytes(config, 2, formats=parameter_formats(config, name))
    assert check_without_storage(config, name) == counted


def test_a_parameter_that_no_tensor_fills(monkeypatch: pytest.MonkeyPatch):
    specs = list(dummy.text_specs(tiny_config()))
    monkeypatch.setattr(dummy, "text_specs", lambda config: specs[:-1])
    with pytest.raises(ValueError, match="differ in lm_head.weight"):
        check_without_storage(tiny_config(), "bf16")


def test_too_large():
    with pytest.raises(
        UserError, match=r"not enough memory .* its shapes were checked without storage: \d+\.\d\d GB as nvfp4"
    ):
        dummy_target("MiniMax-M3", target_config("MiniMax-M3"), "nvfp4")


def test_fewer_layers():
    full = target_config("MiniMax-M3")
    config = DummyWeights("mxfp8", 5).config(full)
    assert config.num_layers == 5 and config.moe_layers == (False, False, False, True, True)
    assert str(DummyWeights("mxfp8", 5)) == "random weights as mxfp8, the first 5 layers"
    with pytest.raises(UserError, match="--layers 61: the target has 60"):
        DummyWeights("bf16", 61).config(full)
