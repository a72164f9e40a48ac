"""The best entries of a row: values, columns and ties to the lower column, and the row's log sum exp."""

import pytest
import torch

from target_model.kernels import top_rows, top_rows_ref
from target_model.kernels.gumbel_ref import gumbel_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def definition(x: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    values, ids = x.float().sort(dim=-1, descending=True, stable=True)
    return values[:, :k], ids[:, :k], x.double().logsumexp(-1).float()


def rows(kind: str, count: int, vocab: int) -> torch.Tensor:
    x = 3 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(vocab))
    if kind == "ties":
        return x.round()
    if kind == "bf16":
        return x.bfloat16()
    if kind == "forbidden":  # a grammar leaves few entries
        x[:, 3:] = -torch.inf
        x[0] = 0.0
        x[-1, ::2], x[-1, 1::2] = 0.0, -0.0
    return x


@pytest.mark.parametrize("kind", ["plain", "ties", "bf16", "forbidden"])
@pytest.mark.parametrize(("vocab", "k"), [(67, 1), (64, 64), (9001, 5), (9001, 64), (5000, 8)])
def test_top_rows(kind, vocab, k):
    x = rows(kind, 3, vocab).to(DEVICE)
    want = definition(x, k)
    for module in (top_rows_ref, top_rows):
        values, ids, lse = module.top_rows(x, k)
        assert torch.equal(values, want[0]) and torch.equal(ids, want[1]), module.__name__
        torch.testing.assert_close(lse, want[2])


def test_a_row_without_any_entry_has_no_mass():
    x = torch.full((2, 70), -torch.inf, device=DEVICE)
    for module in (top_rows_ref, top_rows):
        values, ids, lse = module.top_rows(x, 3)
        assert values.isneginf().all() and ids.tolist() == [[0, 1, 2]] * 2 and lse.isneginf().all()


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noisy_entries(mapped, dtype):
    count, vocab = 5, 5003
    x = rows("plain", count, vocab).to(dtype).to(DEVICE)
    scale = torch.linspace(0.5, 2, count, device=DEVICE)
    keys = [torch.tensor(each, device=DEVICE) for each in ([1, -5, 2**40, 7, 7], [0, 1, 2, 0, 0], [3, 9, 70, 5, 6])]
    tokens = torch.arange(vocab, device=DEVICE) * 3 + 1 if mapped else None
    noise = gumbel_rows(*keys, 3 * vocab)[:, tokens if mapped else slice(0, vocab)]
    want = definition(x.float() * scale[:, None] + noise, 7)
    for module in (top_rows_ref, top_rows):
        values, ids, lse = module.noisy_top_rows(x, 7, scale, *keys, tokens)
        assert torch.equal(ids, want[1]), module.__name__
        torch.testing.assert_close(values, want[0])
        torch.testing.assert_close(lse, want[2])
        shared = module.noisy_top_rows(x.repeat_interleave(2, 0), 7, scale, *keys, tokens)
        assert torch.equal(shared[1], ids.repeat_interleave(2, 0))


def test_more_than_it_can_keep_is_an_error():
    with pytest.raises(ValueError, match="k is 65"):
        top_rows.top_rows(torch.zeros(1, 100, device=DEVICE), 65)
