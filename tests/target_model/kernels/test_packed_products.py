"""Products with one packed weight: few rows, and many rows (widened in memory), against the widened weight."""

import pytest
import torch

from target_model.kernels import packed_products, packed_products_ref
from target_model.quantised import QuantisedWeight
from target_model.quantised_formats import FP8, MXFP4, MXFP8, NVFP4, NVFP4_PACKED, quantise, tensor_scale_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = [MXFP4, MXFP8, NVFP4, NVFP4_PACKED, FP8]


def random_weight(form, rows: int, columns: int, seed: int = 0) -> QuantisedWeight:
    numbers = 0.3 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight = QuantisedWeight((rows, columns), form).to_empty(device=DEVICE)
    if form is FP8:
        weight.values.copy_(numbers.to(torch.float8_e4m3fn))
        weight.scale.copy_(torch.rand(rows, 1) + 0.5)
        return weight
    scale = tensor_scale_of(form, numbers.abs().max()) if form.tensor_scale else None
    weight.store(quantise(form, numbers.to(DEVICE), scale), ())
    return weight


def random_rows(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(9)).bfloat16().to(DEVICE)


def relative(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.float() - want).norm() / want.norm())


# The interpreter cuts bf16 where the GPU rounds.
ALLOWED = 0.005 if DEVICE == "cuda" else 0.01


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize(("rows", "columns", "outputs"), [(1, 192, 200), (21, 320, 72), (2, 2080, 40)])
def test_linear(form, rows, columns, outputs):
    """Edges that no tile divides; columns split over programs where there are many for few outputs."""
    x, weight = random_rows(rows, columns), random_weight(form, outputs, columns)
    assert relative(packed_products.linear(x, weight), packed_products_ref.linear(x.float(), weight)) < ALLOWED


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_widened(form):
    weight = random_weight(form, 50, 288)
    out = packed_products.widened(packed_products.operand(weight, random_rows(1, 1)), 7)
    torch.testing.assert_close(out.float(), weight.dequantised(slice(7, 50), torch.float32), rtol=2**-7, atol=0)


def test_many_rows_are_multiplied_with_widened_tiles(monkeypatch):
    monkeypatch.setattr(packed_products, "TILE_ROWS", 32)
    x, weight = random_rows(packed_products.MANY_ROWS, 64), random_weight(MXFP4, 80, 64)
    assert relative(packed_products.linear(x, weight), packed_products_ref.linear(x.float(), weight)) < ALLOWED


@pytest.mark.parametrize("form", [MXFP8, NVFP4], ids=lambda form: form.name)
def test_mlp(form):
    x, w13, w2 = random_rows(5, 160), random_weight(form, 192, 160), random_weight(form, 160, 96, seed=1)
    out = packed_products.mlp(x, w13, w2, 1.702, 7.0, 1.0)
    assert relative(out, packed_products_ref.mlp(x.float(), w13, w2, 1.702, 7.0, 1.0)) < 2 * ALLOWED
