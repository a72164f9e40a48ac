"""Number formats: bytes decoded by hand, against independent implementations, and what quantising loses."""

import warnings

import pytest
import torch
from torch import Tensor

from target_model.quantised_formats import (
    E2M1,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_PACKED,
    Format,
    Packed,
    dequantise,
    quantise,
    round_e2m1,
    tensor_scale_of,
)


def random_weight(rows: int = 48, columns: int = 192) -> Tensor:
    """Rows and groups of very different sizes, one group of zeros."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 2, rows)[:, None]
    weight[5, 32:64] = 0
    return weight.bfloat16()


def packed(form: Format, weight: Tensor) -> Packed:
    return quantise(form, weight, tensor_scale_of(form, weight.abs().max()) if form.tensor_scale else None)


def widened(stored: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    return dequantise(stored.form, stored.values, stored.scale, stored.tensor_scale, dtype)


def random_bytes(form: Format, rows: int = 16, columns: int = 128) -> Packed:
    """Every code and many scales: not only those that quantising produces."""
    generator = torch.Generator().manual_seed(4)

    def draw(shape: tuple[int, ...], low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    values = draw(form.values_shape((rows, columns)), 0, 256)
    if form.per_byte == 1:
        values = torch.where(values & 0x7F == 0x7F, 0, values).view(torch.float8_e4m3fn)  # without NaN
    scale = draw(form.scale_shape((rows, columns)), 90, 127)
    if form.tensor_scale:
        return Packed(form, values, scale.view(torch.float8_e4m3fn), torch.tensor(0.0123))
    return Packed(form, values, scale)


both_ways = pytest.mark.parametrize(
    "make", [lambda form: packed(form, random_weight()), random_bytes], ids=["made", "random"]
)


def test_bytes_by_hand():
    """0x72: the low nibble, 2, is column 0 and means 1; the high one, 7, means 6. Scale 130 means 2 ** 3."""
    values = torch.full((1, 16), 0x72, dtype=torch.uint8)
    values[0, 3] = 0x9F  # low 15: -6; high 9: -0.5
    numbers = dequantise(MXFP4, values, torch.tensor([[130]], dtype=torch.uint8), None)
    assert numbers[0, :8].tolist() == [8.0, 48.0, 8.0, 48.0, 8.0, 48.0, -48.0, -4.0]
    ones = torch.ones(1, 32).to(torch.float8_e4m3fn)
    assert dequantise(MXFP8, ones, torch.tensor([[120]], dtype=torch.uint8), None)[0, 0] == 2.0**-7
    assert dequantise(MXFP8, ones, torch.tensor([[255]], dtype=torch.uint8), None).isnan().all()
    scale = torch.tensor([[1.5]]).to(torch.float8_e4m3fn)
    for form, expected in ((NVFP4, 6.0), (NVFP4_PACKED, 1.5 / 4)):
        assert dequantise(form, values[:, :8], scale, torch.tensor(4.0))[0, 0] == expected


def test_reciprocal_scales_divide():
    """To the last bit in fp32: multiplying by the reciprocal would differ."""
    scale = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    ones = torch.full((126, 8), 0x22, dtype=torch.uint8)
    for divisor in (torch.tensor(3.0), torch.tensor(0.7), torch.tensor(49.0)):
        assert torch.equal(dequantise(NVFP4_PACKED, ones, scale, divisor)[:, :1], scale.float() / divisor)
        assert torch.equal(dequantise(NVFP4, ones, scale, divisor)[:, :1], scale.float() * divisor)
    rows = torch.linspace(0.3, 5, 126)
    assert torch.equal(dequantise(NVFP4, ones, scale, rows)[:, :1], scale.float() * rows[:, None])


def test_ties_go_to_the_even_code():
    ties = torch.tensor([(low + high) / 2 for low, high in zip(E2M1, E2M1[1:], strict=False)])
    assert round_e2m1(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert round_e2m1(-torch.tensor([*E2M1, 100.0])).tolist() == [8, 9, 10, 11, 12, 13, 14, 15, 15]


@pytest.mark.parametrize("form", [MXFP8, MXFP4], ids=lambda form: form.name)
def test_representable_numbers_survive(form: Format):
    numbers = widened(packed(form, random_weight()))
    assert torch.equal(widened(packed(form, numbers)), numbers)


@pytest.mark.parametrize(
    ("form", "bound"), [(MXFP8, 0.032), (MXFP4, 0.14), (NVFP4, 0.12)], ids=["mxfp8", "mxfp4", "nvfp4"]
)
def test_round_trip_error(form: Format, bound: float):
    """Relative to each row's size, for rows that do not vanish beside the largest (NVFP4 has one scale for all)."""
    weight = random_weight().float()[24:]
    error = (widened(packed(form, weight)) - weight).square().sum(-1) / weight.square().sum(-1)
    assert 0.001 < error.sqrt().max() < bound
    assert widened(packed(form, random_weight()))[5, 32:64].abs().max() == 0


def test_the_better_exponent_is_chosen():
    """Of both exponents around the largest magnitude, neither alone does as well."""
    weight = random_weight().float()
    stored = packed(MXFP4, weight)
    error = (widened(stored) - weight).square().sum()
    groups = weight.unflatten(-1, (-1, 32))
    for shift in (0, 1):
        exponent = (groups.abs().amax(-1) / 6).clamp(min=2.0**-120).log2().floor() + shift
        codes = round_e2m1(groups / exponent.exp2()[..., None]).flatten(-2)
        fixed = dequantise(MXFP4, codes[:, 0::2] | codes[:, 1::2] << 4, (exponent + 127).to(torch.uint8), None)
        assert (fixed - weight).square().sum() > error


@both_ways
@pytest.mark.parametrize("form", [MXFP8, MXFP4, NVFP4_PACKED], ids=lambda form: form.name)
def test_equals_compressed_tensors(form: Format, make):
    """Bit for bit, in the bf16 that it widens to."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (pip install '.[interop]')")
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    stored = make(form)
    compressor, preset = {
        MXFP8: (MXFP8QuantizationCompressor, "MXFP8"),
        MXFP4: (MXFP4PackedCompressor, "MXFP4"),
        NVFP4_PACKED: (NVFP4PackedCompressor, "NVFP4"),
    }[form]
    scheme: QuantizationScheme = preset_name_to_scheme(preset, ["Linear"])
    state = {"weight" if form == MXFP8 else "weight_packed": stored.values, "weight_scale": stored.scale}
    if form.tensor_scale:
        state["weight_global_scale"] = stored.tensor_scale.reshape(1)
    theirs = compressor.decompress(state, scheme)["weight"]
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(widened(stored, torch.bfloat16), theirs)


@both_ways
@pytest.mark.parametrize("form", [MXFP8, MXFP4, NVFP4], ids=lambda form: form.name)
def test_equals_torchao(form: Format, make):
    """Bit for bit in fp32."""
    pytest.importorskip("torchao", reason="torchao is not installed (pip install '.[interop]')")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.mx_formats.mx_tensor import to_dtype
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    stored = make(form)
    if form == NVFP4:
        tensor = NVFP4Tensor(stored.values, stored.scale, 16, torch.float32, per_tensor_scale=stored.tensor_scale)
        theirs = tensor.dequantize(torch.float32)
    else:
        element = torch.float8_e4m3fn if form == MXFP8 else torch.float4_e2m1fn_x2
        theirs = to_dtype(stored.values, stored.scale.view(torch.float8_e8m0fnu), element, 32, torch.float32)
    assert torch.equal(widened(stored), theirs)
