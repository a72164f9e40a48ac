"""Products with quantised weights: tile by tile, expert by expert, and which of them a GPU kernel takes."""

from types import SimpleNamespace

import pytest
import torch

from target_model import quantised
from target_model.dummy import dummy_target
from target_model.kernels import moe_ref, ops
from target_model.moe import MixtureOfExperts
from tests.fixtures import tiny_config

ROUTING = (1.702, 7.0, 1.0)


def experts(name: str) -> MixtureOfExperts:
    return dummy_target("t", tiny_config(), name).layers[3].mlp


def routed(rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(rows)])
    return torch.rand(rows, 2), chosen


def test_tiles_of_a_dense_weight(monkeypatch: pytest.MonkeyPatch):
    weight = dummy_target("t", tiny_config(), "mxfp8").layers[0].attention.packed
    x = torch.randn(3, 64)
    whole = torch.nn.functional.linear(x, weight.dequantised(slice(None), torch.float32))
    monkeypatch.setattr(quantised, "TILE_ROWS", 48)
    assert weight.shape[0] > 2 * 48
    assert torch.allclose(quantised.linear(x, weight), whole, atol=1e-6)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_reference_of_quantised_experts(name: str):
    layer, (weights, chosen), x = experts(name), routed(), torch.randn(6, 64)
    plain = [torch.stack([w.dequantised(e, torch.float32) for e in range(4)]) for w in (layer.w13, layer.w2)]
    expected = moe_ref.grouped_experts(x, *plain, weights, chosen, *ROUTING)
    assert torch.allclose(ops.grouped_experts(x, layer.w13, layer.w2, weights, chosen, *ROUTING), expected, atol=1e-6)


def test_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch):
    """Plain weights, and bf16 rows with packed ones. Everything else is widened by the reference."""
    calls = []
    kernel = SimpleNamespace(grouped_experts=lambda *operands, **_: calls.append(operands))
    monkeypatch.setattr(ops, "_implementation", lambda module, operand: kernel)
    weights, chosen = routed()
    x = torch.randn(6, 64)
    for name in ("mxfp8", "mxfp4", "nvfp4"):
        layer = experts(name)
        ops.grouped_experts(x.bfloat16(), layer.w13, layer.w2, weights, chosen, *ROUTING)
        operands = calls.pop()
        assert operands[1] is layer.w13 and operands[2] is layer.w2
        assert ops.grouped_experts(x, layer.w13, layer.w2, weights, chosen, *ROUTING).shape == (6, 64)
    mixed = experts("mxfp8").w13, experts("nvfp4").w2
    assert ops.grouped_experts(x.bfloat16(), *mixed, weights, chosen, *ROUTING).dtype == torch.bfloat16
    assert not calls
    layer = experts("bf16")
    ops.grouped_experts(x, layer.w13, layer.w2, weights, chosen, *ROUTING)
    assert calls[0][1] is layer.w13
