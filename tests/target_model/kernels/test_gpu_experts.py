"""On a GPU, packed weights: widening bit for bit, and the error of experts and dense products with the widths of
MiniMax-M3 against fp32."""

import pytest
import torch
import triton
import triton.language as tl

from target_model.kernels import moe, moe_ref, packed_products, packed_products_ref
from target_model.kernels.moe_widen import multiplier, widen_word
from target_model.quantised import QuantisedWeight
from target_model.quantised_formats import MXFP4, MXFP8, NVFP4, Format, dequantise

pytestmark = pytest.mark.gpu
HIDDEN, WIDTH, EXPERTS, PER_TOKEN = 6144, 3072, 16, 4
ACTIVATION = (1.702, 7.0, 1.0)
FORMATS = [MXFP4, MXFP8, NVFP4]


@triton.jit
def widen_all(words, scales, out, N: tl.constexpr, PER: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    factor = multiplier(tl.load(scales + i), FORMAT, GROUP)
    tl.store(out + i * PER + N, widen_word(tl.load(words + i), factor, N, FORMAT, False).to(tl.float32))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_every_word_is_widened_to_the_bit(form):
    """All 65,536 words, with scales from the smallest to the largest that are exact."""
    scales = {MXFP4: [27, 100, 127, 144], MXFP8: [27, 100, 127, 144], NVFP4: [1, 7, 0x38, 126]}[form]
    words = torch.arange(1 << 16, device="cuda").repeat(len(scales)).to(torch.int16)
    scale = torch.tensor(scales, dtype=torch.uint8, device="cuda").repeat_interleave(1 << 16)
    per = 2 * form.per_byte
    out = torch.empty(len(words), per, device="cuda")
    for n in range(per):
        widen_all[(len(words) // 1024,)](words, scale, out, n, per, "e2m1" if per == 4 else "e4m3", form.group)
    values = words.view(torch.uint8).view(-1, 2).repeat(1, form.group // per).view(form.values_dtype)
    tensor_scale = torch.ones((), device="cuda") if form.tensor_scale else None
    want = dequantise(form, values, scale[:, None].view(form.scale_dtype), tensor_scale)[:, :per]
    got = (out * 65536).where(~want.isnan(), want)  # the codes of NaN read as numbers
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def random_weight(form: Format, *shape: int) -> QuantisedWeight:
    """Random codes under scales that differ from group to group; numbers of the size of 1 / sqrt(K)."""
    weight = QuantisedWeight(shape, form).to_empty(device="cuda")
    codes = weight.values.view(torch.uint8).random_(0, 256)
    if form.per_byte == 1:
        codes.sub_((codes.bitwise_and(0x7F) == 0x7F).to(torch.uint8))
    if form.tensor_scale:
        weight.scale.view(torch.uint8).random_(0x30, 0x40)
        weight.tensor_scale.uniform_(0.002, 0.006)
    else:
        weight.scale.random_(*((117, 121) if form is MXFP4 else (110, 114)))
    return weight


def relative(x: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the error over the norm of the truth; NaN stays NaN and fails every comparison."""
    return float((x.float() - want).norm() / want.norm())


@pytest.mark.parametrize("rows", [1, 4, 37, 128, 300])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_error_of_experts_is_at_most_twice_that_of_pytorch(form, rows):
    w13, w2 = random_weight(form, EXPERTS, 2 * WIDTH, HIDDEN), random_weight(form, EXPERTS, HIDDEN, WIDTH)
    shared = random_weight(form, 2 * WIDTH, HIDDEN), random_weight(form, HIDDEN, WIDTH)
    x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    chosen = torch.rand(rows, EXPERTS, device="cuda").topk(PER_TOKEN, dim=-1).indices
    shares = torch.rand(rows, PER_TOKEN, device="cuda")
    for both in (None, shared):
        want = moe_ref.grouped_experts(x.float(), w13, w2, shares, chosen, *ACTIVATION, shared=both)
        plain = moe_ref.grouped_experts(x, w13, w2, shares, chosen, *ACTIVATION, shared=both)
        # Among more experts, elsewhere, the same rows get smaller tiles.
        for over in (EXPERTS, 8 * EXPERTS):
            out = moe.grouped_experts(x, w13, w2, shares, chosen, *ACTIVATION, routed_over=over, shared=both)
            assert relative(out, want) <= 2 * relative(plain, want), f"{over}: {relative(out, want)}"


@pytest.mark.parametrize("rows", [1, 12, 64, 300, 700])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_error_of_dense_products_is_at_most_twice_that_of_pytorch(form, rows):
    w13, w2 = random_weight(form, 2 * WIDTH, HIDDEN), random_weight(form, HIDDEN, WIDTH)
    x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    for name, operands in (("linear", (w13,)), ("mlp", (w13, w2, *ACTIVATION))):
        reference, kernel = (getattr(module, name) for module in (packed_products_ref, packed_products))
        want = reference(x.float(), *operands)
        error, allowed = relative(kernel(x, *operands), want), 2 * relative(reference(x, *operands), want)
        assert error <= allowed, f"{name}: {error} against {allowed}"
