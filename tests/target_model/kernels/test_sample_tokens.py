"""Rows whose filters cut where candidates of chunks are easily mistaken: the kernel against the reference."""

import pytest
import torch

from target_model.kernels import sample_tokens, sample_tokens_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 12


@pytest.fixture(autouse=True)
def fresh_memory_holds_anything(monkeypatch):
    honest = torch.empty

    def poisoned(*shape, **options):
        fresh = honest(*shape, **options)
        return fresh.fill_(-3e38 if fresh.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", poisoned)


def both(logits_V: torch.Tensor, top_k: int, top_p: float = 1.0, min_p: float = 0.0) -> list[list[int]]:
    """Tokens of one row of logits under many seeds, by kernel and reference."""
    n = torch.arange(ROWS, device=DEVICE)
    floats = torch.ones(ROWS, device=DEVICE)
    settings = (floats, torch.full_like(n, top_k).int(), top_p * floats, min_p * floats, n * 977, n % 2, n + 5)
    logits = logits_V.to(DEVICE).expand(ROWS, -1).contiguous()
    return [module.sample_tokens(logits, *settings).tolist() for module in (sample_tokens, sample_tokens_ref)]


def test_settings_are_for_consecutive_rows():
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    columns = [torch.tensor(each, device=DEVICE) for each in ([1.0, 0.0], [0.9, 1.0], [0.0, 0.1], [7, -9], [0, 2])]
    temperature, top_p, min_p, seed, choice = columns
    settings = (temperature, torch.tensor([5, 0], dtype=torch.int32, device=DEVICE), top_p, min_p, seed, choice)
    position = torch.tensor([4, 5, 6, 4, 5, 6], device=DEVICE)
    for module in (sample_tokens, sample_tokens_ref):
        alone = module.sample_tokens(logits, *(each.repeat_interleave(3) for each in settings), position)
        assert torch.equal(module.sample_tokens(logits, *settings, position), alone)
    with pytest.raises(ValueError, match="6 rows cannot share 4 settings"):
        sample_tokens.sample_tokens(logits, *(each.repeat(2) for each in settings), position)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_top_k_that_lies_in_one_chunk(top_p):
    """Of 100 wanted entries one chunk of the two holds all but keeps 64, whose neighbours are worth nearly as much."""
    logits = torch.full((5000,), -1.0)
    logits[:64], logits[128:192] = torch.linspace(1.0, 0.8, 64), torch.linspace(0.9, 0.7, 64)
    out, want = both(logits, 100, top_p)
    assert out == want and any(token in range(128, 192) for token in want)


@pytest.mark.parametrize("ties", [10, 100])
def test_ties_at_the_border_of_the_top_k_count_up_to_k_in_the_mass(ties):
    """Three entries of weight 1 and ten or more of 1/2: top-k 5 leaves a mass of 4, of which 0.9 needs one of them."""
    logits = torch.full((300,), -20.0)
    logits[:3], logits[100 : 100 + ties] = 0.0, -0.6931472
    out, want = both(logits, 5, 0.9)
    assert out == want and any(token >= 100 + ties // 2 for token in want)
    out, want = both(logits, 5, 0.7)
    assert out == want and all(token < 3 for token in want)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_top_k_of_many(top_p):
    """Its 300 entries hold about two thirds of the mass."""
    logits = torch.randn(1200, generator=torch.Generator().manual_seed(1))
    out, want = both(logits, 300, top_p)
    assert out == want and len(set(want)) > ROWS / 2


def test_ties_at_the_border_of_a_top_k_of_many():
    """290 entries of weight 1, 1,000 of 1/2: top-k 300 leaves a mass of 295, of which 0.985 needs one of the 1,000."""
    logits = torch.full((1500,), -20.0)
    logits[:290], logits[400:1400] = 0.0, -0.6931472
    out, want = both(logits, 300, 0.985)
    assert out == want and any(token >= 400 for token in want)
    out, want = both(logits, 300, 0.98)
    assert out == want and all(token < 290 for token in want)


def test_min_p_below_all_candidates_and_above():
    logits = torch.linspace(2.0, 1.0, 5000)
    for min_p in (0.999, 0.5, 0.1):
        out, want = both(logits, 0, min_p=min_p)
        assert out == want
