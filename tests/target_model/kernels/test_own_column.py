"""The merged own column and its gradient against the definition: one softmax over all keys."""

import pytest
import torch

from target_model.kernels import own_column, own_column_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def attention(q, others, keys, values, scale):
    """Softmax over the other keys and the column, [N, Q, D]; (output, log-sum-exp)."""
    groups = q.shape[1] // keys[0].shape[1]
    all_k, all_v = (
        torch.cat([other, torch.stack(own, 2)], 2).repeat_interleave(groups, 1)
        for other, own in zip(others, (keys, values), strict=True)
    )
    scores = (all_k @ q[..., None])[..., 0] * scale
    return (scores.softmax(-1)[..., None, :] @ all_v)[..., 0, :], scores.logsumexp(-1)


@pytest.mark.parametrize("module", [own_column, own_column_ref])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "keys"), [(4, 4, 8, 1), (6, 2, 12, 3), (5, 5, 16, 6)])
def test_equals_one_softmax_over_all_keys(module, heads, kv_heads, dim, keys):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    rows, scale = 5, dim**-0.5
    q, upstream = randn(rows, heads, dim), randn(rows, heads, dim)
    others = [randn(rows, kv_heads, 7, dim) for _ in range(2)]
    column = [[randn(rows, kv_heads, dim) for _ in range(keys)] for _ in range(2)]
    exact = [x.double().requires_grad_() for x in (q, *column[0], *column[1])]
    wide = [x.double() for x in others]
    want, want_lse = attention(exact[0], wide, exact[1 : 1 + keys], exact[1 + keys :], scale)
    (want * upstream.double()).sum().backward()
    other_k, other_v = (x.repeat_interleave(heads // kv_heads, 1) for x in others)
    scores = (other_k @ q[..., None])[..., 0] * scale
    part = (scores.softmax(-1)[..., None, :] @ other_v)[..., 0, :]
    out, lse = module.merge_column(q, part, scores.logsumexp(-1), *column, scale)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)
    # What flash attention's backward makes of the merged output: the gradient of q through the other keys.
    weights = (scores - lse[..., None]).exp()
    delta = (other_v @ upstream[..., None])[..., 0] - (upstream * out).sum(-1)[..., None]
    dq = ((weights * delta * scale)[..., None, :] @ other_k)[..., 0, :]
    dk, dv = module.column_gradient(upstream, q, out, lse, dq, *column, scale)
    for ours, reference in zip((dq, *dk, *dv), exact, strict=True):
        torch.testing.assert_close(ours.double(), reference.grad, atol=1e-5, rtol=1e-4)
