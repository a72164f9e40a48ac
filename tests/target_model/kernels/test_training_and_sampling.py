"""linear + KL, token sampling and commit against their references."""

import pytest
import torch

from serve.noise import gumbel
from target_model.kernels import (
    commit_rows,
    commit_rows_ref,
    linear_kl,
    linear_kl_ref,
    sample_tokens,
    sample_tokens_ref,
)
from tests.target_model.kernels.batches import tree_batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(("rows", "vocab", "chunk"), [(7, 300, 3), (4, 5000, 8)])
def test_linear_kl(rows, vocab, chunk):
    teacher_state, teacher_head = randn(rows, 24, seed=3), randn(vocab, 24, seed=4)
    weights = torch.rand(rows, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    results = []
    for module in (linear_kl, linear_kl_ref):
        state, head = randn(rows, 16, seed=1).requires_grad_(), randn(vocab, 16, seed=2).requires_grad_()
        loss, kl, alpha, hits = module.linear_kl(state, head, teacher_state, teacher_head, weights, chunk)
        (3 * loss).backward()
        results.append((loss.detach(), kl, alpha, hits, state.grad, head.grad))
        with torch.no_grad():
            assert torch.equal(module.linear_kl(state, head, teacher_state, teacher_head, weights, chunk)[2], alpha)
    for out, want in zip(*results, strict=True):
        torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-4)


def columns(rows: int) -> dict[str, torch.Tensor]:
    """A different filter on every row; the last row is greedy."""
    temperature = torch.tensor([1.0, 0.7, 1.3, 1.0, 2.0, 0.0])[:rows]
    top_k = torch.tensor([0, 5, 40, 0, 3, 7], dtype=torch.int32)[:rows]
    top_p = torch.tensor([1.0, 1.0, 0.9, 0.8, 0.5, 0.9])[:rows]
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.05, 0.0, 0.0])[:rows]
    seed = torch.tensor([1, 2**40 + 7, -5, 4, 5, 6])[:rows]
    position = torch.tensor([0, 11, 500_000, 3, 4, 5])[:rows]
    parts = {"temperature_R": temperature, "top_k_R": top_k, "top_p_R": top_p, "min_p_R": min_p}
    parts |= {"seed_R": seed, "choice_R": torch.arange(rows), "position_N": position}
    return {name: x.to(DEVICE) for name, x in parts.items()}


@pytest.mark.parametrize("vocab", [67, 5000])
def test_sample_tokens(vocab):
    for trial in range(3):
        logits = 3 * randn(6, vocab, seed=trial)
        arguments = columns(6)
        out = sample_tokens.sample_tokens(logits, **arguments)
        assert torch.equal(out, sample_tokens_ref.sample_tokens(logits, **arguments))


def test_top_k_of_one_is_greedy_and_equal_values_stay_together():
    logits = torch.zeros(6, 40, device=DEVICE)
    logits[:, 7] = 1.0
    arguments = columns(6) | {"top_k_R": torch.ones(6, dtype=torch.int32, device=DEVICE)}
    assert sample_tokens.sample_tokens(logits, **arguments).tolist() == [7] * 6
    logits[:, 9] = 1.0
    assert set(sample_tokens.sample_tokens(logits.repeat(4, 1), **{
        name: torch.cat([x] * 4) + (torch.arange(24, device=DEVICE) if name == "position_N" else 0) for name,
        x in arguments.items()
    }).tolist()) == {7, 9}  # fmt: skip


def test_more_equal_values_than_candidates():
    logits = randn(6, 5000).round().clamp(max=0)  # about half of the values are 0, the largest
    arguments = columns(6)
    assert (logits == 0).sum(-1).min() > 1024
    for flat in (logits, logits * 0):
        want = sample_tokens_ref.sample_tokens(flat, **arguments)
        assert torch.equal(sample_tokens.sample_tokens(flat, **arguments), want)


def test_noise_is_the_one_of_the_engine():
    logits, arguments = torch.zeros(3, 4096, device=DEVICE), columns(3)
    arguments["temperature_R"] = torch.ones(3, device=DEVICE)
    arguments["top_k_R"] = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    arguments["top_p_R"] = torch.ones(3, device=DEVICE)
    keys = (arguments["seed_R"].tolist(), arguments["choice_R"].tolist(), arguments["position_N"].tolist())
    assert torch.equal(sample_tokens.sample_tokens(logits, **arguments), gumbel(*keys, 4096, DEVICE).argmax(-1))


@pytest.mark.parametrize(
    ("kv_dtype", "index_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_commit_rows(kv_dtype, index_dtype):
    batch, pages = tree_batch([29, 5, 16], [12, 3, 9], 16, device=DEVICE)
    path = torch.tensor([[1, 2, 4, 7, 11], [-1, -1, -1, -1, -1], [3, 5, 8, -1, -1]], device=DEVICE)
    results = []
    for module in (commit_rows, commit_rows_ref):
        pools = [randn(3, pages, 16, 2, 32), randn(3, pages, 16, 2, 32, seed=1), randn(2, pages, 16, 32, seed=2)]
        pools = [pool.to(dtype) for pool, dtype in zip(pools, (kv_dtype, kv_dtype, index_dtype), strict=True)]
        before = [pool.clone() for pool in pools]
        module.commit_rows(*pools, path, batch)
        assert not torch.equal(pools[0].float(), before[0].float())
        results.append(pools)
    for out, want in zip(*results, strict=True):
        assert torch.equal(out.float(), want.float())
