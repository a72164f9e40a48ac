"""What the draft's layer does between its products, with gradients, against the references."""

import pytest
import torch

from target_model.kernels import rotate_heads, rotate_heads_ref, silu_product, silu_product_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(("lead", "heads", "kv_heads", "dim"), [((2, 3), 4, 4, 8), ((5,), 17, 2, 16), ((4,), 3, 1, 12)])
def test_rotated_heads_and_their_gradient(lead, heads, kv_heads, dim):
    positions = torch.randint(1000, lead, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    frequencies = 1e4 ** -(torch.arange(0, dim, 2, device=DEVICE) / dim)
    results = []
    for module in (rotate_heads, rotate_heads_ref):
        packed = randn(*lead, heads + 2 * kv_heads, dim, seed=2).requires_grad_()
        parts = module.rotate_heads(packed, positions, frequencies, heads, kv_heads)
        assert [part.shape[-2] for part in parts] == [heads, kv_heads, kv_heads]
        sum((part * randn(*part.shape, seed=3 + i)).sum() for i, part in enumerate(parts)).backward()
        results.append([*(part.detach() for part in parts), packed.grad])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rows", "width"), [(3, 40), (2, 1030), (0, 8)])
def test_silu_product_and_its_gradient(rows, width):
    results = []
    for module in (silu_product, silu_product_ref):
        gate_up = (3 * randn(rows, 2 * width, seed=1)).requires_grad_()
        out = module.silu_product(gate_up)
        (out * randn(rows, width, seed=2)).sum().backward()
        results.append((out.detach(), gate_up.grad))
        with torch.no_grad():
            assert torch.equal(module.silu_product(gate_up[None])[0], out)
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)
