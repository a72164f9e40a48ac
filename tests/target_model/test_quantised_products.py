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
    """bf16 rows with MXFP8 or MXFP4: the bytes as they are. Everything else is widened by the reference."""
    calls = []
    kernel = SimpleNamespace(grouped_experts=lambda *operands, **scales: calls.append((operands, scales)))
    monkeypatch.setattr(ops, "_implementation", lambda module, operand: kernel)
    weights, chosen = routed()
    x = torch.randn(6, 64)
    for name in ("mxfp8", "mxfp4"):
        layer = experts(name)
        ops.grouped_experts(x.bfloat16(), layer.w13, layer.w2, weights, chosen, *ROUTING)
        operands, scales = calls.pop()
        assert operands[1] is layer.w13.values and operands[2] is layer.w2.values
        assert scales == {"w13_scale": layer.w13.scale, "w2_scale": layer.w2.scale, "routed_over": None}
        assert ops.grouped_experts(x, layer.w13, layer.w2, weights, chosen, *ROUTING).shape == (6, 64)
    layer = experts("nvfp4")
    assert ops.grouped_experts(x.bfloat16(), layer.w13, layer.w2, weights, chosen, *ROUTING).dtype == torch.bfloat16
    assert not calls
    layer = experts("bf16")
    ops.grouped_experts(x, layer.w13, layer.w2, weights, chosen, *ROUTING)
    assert calls[0][0][1] is layer.w13 and calls[0][1] == {"routed_over": None}
