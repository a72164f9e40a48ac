"""The kernels around attention and the mixture of experts against their references."""

import pytest
import torch

from target_model.kernels import (
    moe,
    moe_ref,
    norm_rope,
    norm_rope_ref,
    norms,
    norms_ref,
    rope_write,
    rope_write_ref,
    silu_product,
    silu_product_ref,
)
from target_model.quantised import QuantisedWeight
from target_model.quantised_formats import MXFP4, MXFP8, NVFP4, NVFP4_PACKED, Format, Packed, quantise, tensor_scale_of
from tests.target_model.kernels.batches import causal_batch, normal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(("heads", "kv_heads", "index_heads", "dim", "rotary"), [(8, 2, 2, 32, 16), (16, 1, 1, 64, 64)])
@pytest.mark.parametrize("kind", ["dense", "sparse", "reuse"])
def test_norm_rope_write(kind, heads, kv_heads, index_heads, dim, rotary):
    batch, pages = causal_batch([5, 30], [3, 1], 16, device=DEVICE)
    extra = 0 if kind == "dense" else index_heads + 1
    packed = normal(batch, heads + 2 * kv_heads + extra, dim)
    scale = randn(heads + kv_heads + extra, dim)
    cos, sin = randn(batch.num_rows, dim, seed=1), randn(batch.num_rows, dim, seed=2)
    cos[:, rotary:], sin[:, rotary:] = 1, 0
    results = []
    for module in (norm_rope, norm_rope_ref):
        k, v = (torch.zeros(pages, 16, kv_heads, dim, device=DEVICE) for _ in range(2))
        index = torch.zeros(pages, 16, dim, device=DEVICE) if kind == "sparse" else None
        q, index_q = module.norm_rope_write(
            packed, scale, cos, sin, rotary, 1e-6, heads, k, v, index, index_heads, batch
        )
        results.append([x for x in (q, index_q, k, v, index) if x is not None])
    for out, want in zip(*results, strict=True):
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("hidden", [96, 192])
def test_norms(hidden):
    x, y, a, b = randn(5, hidden), randn(5, hidden, seed=1), randn(hidden, seed=2), randn(hidden, seed=3)
    for out, want in zip(norms.add_norm(x, y, a, 1e-6), norms_ref.add_norm(x, y, a, 1e-6), strict=True):
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(norms.dual_norm(x, y, a, b, 1e-6), norms_ref.dual_norm(x, y, a, b, 1e-6))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 8, 32), (8, 2, 64), (5, 5, 16)])
def test_rope_write(heads, kv_heads, dim):
    batch, pages = causal_batch([5, 30], [3, 1], 16, device=DEVICE)
    packed, frequencies = normal(batch, heads + 2 * kv_heads, dim), 1e4 ** -(torch.arange(dim // 2) / (dim // 2))
    results = []
    for module in (rope_write, rope_write_ref):
        k, v = (torch.zeros(pages, 16, kv_heads, dim, device=DEVICE) for _ in range(2))
        results.append((module.rope_write(packed, frequencies.to(DEVICE), heads, k, v, batch), k, v))
    for out, want in zip(*results, strict=True):
        assert want.abs().max() > 1
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [96, 1100])
def test_silu_product(width):
    x = randn(5, 2 * width)
    torch.testing.assert_close(silu_product.silu_product(x), silu_product_ref.silu_product(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rows", "experts", "top_k", "hidden"), [(1, 8, 2, 96), (19, 12, 4, 192)])
def test_route(rows, experts, top_k, hidden):
    x, gate, bias = randn(rows, hidden), 0.1 * randn(experts, hidden, seed=1), randn(experts, seed=2)
    weights, chosen = moe.route(x, gate, bias, top_k, 2.0)
    want_weights, want_chosen = moe_ref.route(x, gate, bias, top_k, 2.0)
    assert torch.equal(chosen, want_chosen)
    torch.testing.assert_close(weights, want_weights, atol=1e-5, rtol=1e-4)


def test_route_takes_the_lower_of_equal_experts():
    x = randn(2, 64)
    _, chosen = moe.route(x, torch.zeros(6, 64, device=DEVICE), torch.zeros(6, device=DEVICE), 3, 2.0)
    assert chosen.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize(("rows", "experts", "top_k", "hidden", "width"), [(1, 8, 2, 96, 48), (23, 5, 3, 160, 96)])
@pytest.mark.parametrize("tile", [None, moe.Tile(32, 64, 32, num_warps=4, num_stages=2)])
def test_grouped_experts(tile, rows, experts, top_k, hidden, width):
    x = randn(rows, hidden)
    w13, w2 = randn(experts, 2 * width, hidden, seed=1) * 0.3, randn(experts, hidden, width, seed=2) * 0.3
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(rows)]).to(DEVICE)
    weights = randn(rows, top_k, seed=3)
    tile = tile or moe.gemm_shape(chosen.numel(), experts)
    out = moe.run_experts(x, w13, w2, weights, chosen, 1.702, 7.0, 1.0, tile=tile)
    want = moe_ref.grouped_experts(x, w13, w2, weights, chosen, 1.702, 7.0, 1.0)
    torch.testing.assert_close(out, want, atol=1e-4, rtol=1e-4)


def test_pairs_whose_expert_is_elsewhere():
    """Id E and weight 0: the kernel writes nothing for such a pair, so what its memory holds must not count."""
    x, w13, w2 = randn(7, 96), randn(5, 96, 96, seed=1) * 0.3, randn(5, 96, 48, seed=2) * 0.3
    chosen = torch.stack([torch.randperm(9)[:3] for _ in range(7)]).clamp(max=5).to(DEVICE)
    chosen[0] = 5
    weights = randn(7, 3, seed=3).masked_fill(chosen == 5, 0.0)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        out = moe.grouped_experts(x, w13, w2, weights, chosen, 1.702, 7.0, 1.0, routed_over=9)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not out[0].any()
    torch.testing.assert_close(
        out, moe_ref.grouped_experts(x, w13, w2, weights, chosen, 1.702, 7.0, 1.0), atol=1e-4, rtol=1e-4
    )
    held = [
        [(weight, expert) for weight, expert in zip(*pair, strict=True) if expert < 5]
        for pair in zip(weights, chosen, strict=True)
    ]
    for row, pairs in enumerate(held):
        alone = [torch.stack(values)[None] for values in zip(*pairs, strict=True)]
        if alone:
            want = moe_ref.grouped_experts(x[row : row + 1], w13, w2, *alone, 1.702, 7.0, 1.0)
            torch.testing.assert_close(out[row : row + 1], want, atol=1e-4, rtol=1e-4)


def packed(form: Format, weight: torch.Tensor) -> QuantisedWeight:
    """Random weights [E, N, K] in a format."""
    stored = QuantisedWeight(tuple(weight.shape), form).to_empty(device=DEVICE)
    for expert, matrix in enumerate(weight):
        scale = tensor_scale_of(form, matrix.abs().max() * (1 + expert)) if form.tensor_scale else None
        part = quantise(form, matrix, scale)
        stored.store(part, (expert,))
    return stored


@pytest.mark.parametrize("form", [MXFP4, MXFP8, NVFP4, NVFP4_PACKED], ids=lambda form: form.name)
@pytest.mark.parametrize(("rows", "experts", "top_k", "hidden", "width"), [(1, 8, 2, 128, 64), (23, 5, 3, 192, 96)])
def test_packed_experts(form, rows, experts, top_k, hidden, width):
    x = randn(rows, hidden).bfloat16()
    weights = randn(experts, 2 * width, hidden, seed=1) * 0.3, randn(experts, hidden, width, seed=2) * 0.3
    weights = [packed(form, weight) for weight in weights]
    exact = [torch.stack([w.dequantised(e, torch.float32) for e in range(experts)]) for w in weights]
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(rows)]).to(DEVICE)
    shares = randn(rows, top_k, seed=3)
    out = moe.grouped_experts(x, *weights, shares, chosen, 1.702, 7.0, 1.0)
    want = moe_ref.grouped_experts(x.float(), *exact, shares, chosen, 1.702, 7.0, 1.0)
    # The interpreter cuts bf16 where the GPU rounds.
    assert float((out.float() - want).norm() / want.norm()) < (0.01 if DEVICE == "cuda" else 0.02)


@pytest.mark.parametrize("form", [MXFP4, MXFP8], ids=lambda form: form.name)
def test_packed_experts_in_large_tiles(form):
    """One tile with more than half of its places taken, one with less, and one sum for each plane."""
    x, shares = randn(40, 192).bfloat16(), torch.ones(40, 1, device=DEVICE)
    w13, w2 = (packed(form, w * 0.3) for w in (randn(3, 128, 192, seed=1), randn(3, 192, 64, seed=2)))
    chosen = torch.tensor([0] * 9 + [1] * 31, device=DEVICE)[:, None]
    tile = moe.Tile(32, 64, 128, num_warps=4, num_stages=3, separate=True)
    out = moe.run_experts(x, w13, w2, shares, chosen, 1.702, 7.0, 1.0, tile=tile)
    want = moe_ref.grouped_experts(x.float(), w13, w2, shares, chosen, 1.702, 7.0, 1.0)
    assert float((out.float() - want).norm() / want.norm()) < (0.01 if DEVICE == "cuda" else 0.02)


@pytest.mark.parametrize("form", [MXFP4, NVFP4], ids=lambda form: form.name)
@pytest.mark.parametrize("rows", [1, 19])
def test_a_shared_expert_in_the_same_launch(form, rows):
    x, width, hidden = randn(rows, 160).bfloat16(), 64, 160
    w13, w2 = (packed(form, w * 0.3) for w in (randn(6, 2 * width, hidden, seed=1), randn(6, hidden, width, seed=2)))
    experts = [QuantisedWeight(weight.shape[1:], form).to_empty(device=DEVICE) for weight in (w13, w2)]
    for shared, weight in zip(experts, (w13, w2), strict=True):
        last = None if weight.tensor_scale is None else weight.tensor_scale[5]
        shared.store(Packed(form, weight.values[5], weight.scale[5], last), ())
    chosen = torch.stack([torch.randperm(6)[:3] for _ in range(rows)]).to(DEVICE)
    shares = randn(rows, 3, seed=3)
    out = moe.grouped_experts(x, w13, w2, shares, chosen, 1.702, 7.0, 1.0, shared=tuple(experts))
    also, every = torch.full((rows, 1), 5, device=DEVICE), torch.ones(rows, 1, device=DEVICE)
    want = moe_ref.grouped_experts(x.float(), w13, w2, torch.cat((shares, every), 1), torch.cat((chosen, also), 1),
                                   1.702, 7.0, 1.0)  # fmt: skip
    assert float((out.float() - want).norm() / want.norm()) < (0.01 if DEVICE == "cuda" else 0.02)
