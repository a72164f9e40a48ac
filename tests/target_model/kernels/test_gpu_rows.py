"""On a GPU: what works on whole rows (noise, best entries, sampling, losses, routing, cache rows) against the
references, at the sizes of MiniMax-M3, and the bundled target as a whole.
"""

import pytest
import torch

from serve.noise import gumbel
from target_model.batch import Batch
from target_model.cache import PagedCache
from target_model.checkpoint import load_target
from target_model.kernels import (
    commit_rows,
    commit_rows_ref,
    linear_kl,
    linear_kl_ref,
    moe,
    moe_ref,
    norm_rope,
    norm_rope_ref,
    ops,
    sample_tokens,
    sample_tokens_ref,
    sparse_attention,
    sparse_attention_ref,
    top_rows,
    top_rows_ref,
    write_kv,
    write_kv_ref,
)
from target_model.kernels import gumbel as gumbel_triton
from target_model.kernels.gumbel_ref import gumbel_rows
from target_model.resolve import BUNDLED
from tests.target_model.kernels.batches import causal_batch, normal, poisoned_pool, tree_batch

pytestmark = pytest.mark.gpu
# Without a GPU the same code runs on less, in the interpreter, when it is asked for.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, ROWS = (200_064, 64) if DEVICE == "cuda" else (5_000, 9)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def keys(rows: int) -> tuple[torch.Tensor, ...]:
    """Seeds of 64 bits, choices and positions."""
    n = torch.arange(rows, device=DEVICE)
    return n * 0x9E3779B97F4A7C1 - 5, n % 3, n * 40_009 + 7


def parameters(rows: int) -> dict[str, torch.Tensor]:
    """Filters of every kind in every combination."""

    def repeated(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).repeat(rows // len(values) + 1)[:rows].to(DEVICE)

    seed_N, choice_N, position_N = keys(rows)
    return {
        "temperature_R": repeated(1.0, 0.7, 1.3, 0.0, 2.0, 1.0, 0.6, 1.0),
        "top_k_R": repeated(0, 5, 40, 7, 3, 0, 200, 64, 40, dtype=torch.int32),
        "top_p_R": repeated(1.0, 1.0, 0.9, 0.9, 0.5, 0.8, 1.0, 0.95, 0.95, 1.0),
        "min_p_R": repeated(0.0, 0.0, 0.0, 0.05, 0.0, 0.0, 0.2),
        "seed_R": seed_N,
        "choice_R": choice_N,
        "position_N": position_N,
    }


def test_noise_has_the_bits_of_the_engine():
    rows = keys(9)
    ids = torch.randint(VOCAB, (9, 64), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ids[:, 0], ids[:, 1] = VOCAB - 1, 0
    out = gumbel_triton.gumbel_at(*rows, ids)
    torch.testing.assert_close(out, gumbel_rows(*rows, VOCAB).gather(1, ids), rtol=1e-6, atol=2e-7)
    on_the_host = gumbel(*(x.tolist() for x in rows), VOCAB, "cpu").gather(1, ids.cpu())
    torch.testing.assert_close(out.cpu(), on_the_host, rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("kind", ["plain", "ties", "forbidden"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_best_entries(kind, dtype):
    x = 4 * randn(ROWS, VOCAB)
    x = x.round() if kind == "ties" else x
    if kind == "forbidden":
        x[1:, 5:] = -torch.inf
    x = x.to(dtype)
    for k in (1, 5, 8, 64):
        for rows in (x, x[:1]):
            values, ids, lse = top_rows.top_rows(rows, k)
            want = top_rows_ref.top_rows(rows, k)
            assert torch.equal(values, want[0]) and torch.equal(ids, want[1])
            torch.testing.assert_close(lse, want[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mapped", [False, True])
def test_best_entries_with_noise(mapped):
    x, scale = 4 * randn(ROWS, VOCAB, dtype=BF16), torch.linspace(0.5, 2, ROWS, device=DEVICE)
    tokens = torch.arange(VOCAB, device=DEVICE) + 7 if mapped else None
    values, ids, lse = top_rows.noisy_top_rows(x, 8, scale, *keys(ROWS), tokens)
    want = top_rows_ref.noisy_top_rows(x, 8, scale, *keys(ROWS), tokens)
    torch.testing.assert_close(values, want[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(lse, want[2], rtol=1e-5, atol=1e-5)
    assert (ids == want[1]).float().mean() > 0.99, "near ties may change places"


@pytest.mark.parametrize("scale", [1.0, 4.0, 12.0])
def test_sampled_tokens(scale):
    """Equal, but where two entries' noisy values, or a filter's border, lie within rounding."""
    logits, settings = scale * randn(ROWS, VOCAB, seed=int(scale)), parameters(ROWS)
    for x in (logits, logits.to(BF16), logits.round()):
        out = sample_tokens.sample_tokens(x, **settings)
        want = sample_tokens_ref.sample_tokens(x, **settings)
        assert torch.equal(out, sample_tokens.sample_tokens(x, **settings)), "the same every time"
        for n in (out != want).nonzero()[:, 0].tolist():
            assert is_near_tie(x[n].float(), n, settings, out[n], want[n]), f"row {n}"
        assert (out == want).float().mean() > 0.95


def is_near_tie(logits_V, n: int, settings: dict[str, torch.Tensor], token, other) -> bool:
    x = logits_V / settings["temperature_R"][n]
    noise = gumbel_rows(*(settings[name][n : n + 1] for name in ("seed_R", "choice_R", "position_N")), VOCAB)[0]
    filters = [settings[name][n : n + 1] for name in ("top_k_R", "top_p_R", "min_p_R")]
    limit = sample_tokens_ref.thresholds(x[None], *filters).item()
    # How many values lie between the border and the lower of the two: rounding moves it by a place or so.
    lower = min(x[token].item(), x[other].item())
    between = ((x >= min(lower, limit)) & (x < max(lower, limit))).sum().item()
    return abs((x + noise)[token] - (x + noise)[other]).item() < 1e-5 or (lower <= limit and between <= VOCAB // 10_000)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP8, BF16), (BF16, FP8), (FP8, FP8), (torch.float32, BF16)])
def test_accepted_rows_move(dtypes):
    batch, pages = tree_batch([2555, 100, 127], [64, 5, 9], 128, device=DEVICE)
    path = torch.tensor([[1, 2, 4, 7, 11], [-1, -1, -1, -1, -1], [3, 5, 8, -1, -1]], device=DEVICE)
    results = []
    for module in (commit_rows, commit_rows_ref):
        pools = [randn(5, pages, 128, 4, 128), randn(5, pages, 128, 4, 128, seed=1), randn(2, pages, 128, 128, seed=2)]
        pools = [pool.to(dtype) for pool, dtype in zip(pools, (dtypes[0], dtypes[0], dtypes[1]), strict=True)]
        module.commit_rows(*pools, path, batch)
        results.append(pools)
    for out, want in zip(*results, strict=True):
        assert torch.equal(out.float(), want.float())


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_loss_rows(dtype):
    student, teacher = 4 * randn(ROWS, VOCAB, dtype=dtype), 4 * randn(5, VOCAB, seed=1, dtype=dtype)
    rows = torch.arange(ROWS, device=DEVICE) % 5
    weights = randn(ROWS, seed=2).abs()
    for gradient in (False, True):
        out, want = student.clone(), student.clone().float()
        sums = linear_kl.kl_rows(out, teacher, rows, weights, gradient)
        expected = linear_kl_ref.kl_rows(want, teacher.float(), rows, weights, gradient)
        for one, other in zip(sums, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out.float(), want, rtol=1e-2 if dtype == BF16 else 1e-4, atol=1e-6)


@pytest.mark.parametrize("tree", [False, True])
def test_sparse_attention_of_the_draft(tree):
    """64 heads of their own keys, no key in slot 0, scratch keys seen without being chosen."""
    heads, dim, page = (64, 128, 128) if DEVICE == "cuda" else (4, 32, 16)
    make = tree_batch if tree else causal_batch
    batch, pages = make([20 * page + 3, 2 * page - 1], [6, 3], page, device=DEVICE)
    q = normal(batch, heads, dim, dtype=BF16)
    k, v = (poisoned_pool(batch, pages, heads, dim, dtype=BF16, seed=seed) for seed in (2, 3))
    generator, blocks = torch.Generator().manual_seed(4), []
    for r, rows in enumerate(batch.row_counts):
        known = int(batch.committed[r]) // page + 1
        for _ in range(rows * heads):
            some = torch.randperm(known, generator=generator)[:8].sort().values
            blocks.append(torch.cat([some, torch.full((8 - len(some),), -1)]))
    blocks_TKN = torch.stack(blocks).view(batch.num_rows, heads, 8).int().to(DEVICE)
    options = {"first_slot": 1, "scratch_chosen": False}

    def reference(*values: torch.Tensor) -> torch.Tensor:
        return sparse_attention_ref.sparse_attention(*values, blocks_TKN, batch, dim**-0.5, **options).float()

    rounded = (q, k.nan_to_num(), v.nan_to_num())
    want = reference(*(x.float() for x in rounded))
    out = sparse_attention.sparse_attention(q, k, v, blocks_TKN, batch, dim**-0.5, **options).float()
    assert (out - want).norm() <= 2 * (reference(*rounded) - want).norm()


def test_an_fp8_cache_holds_its_largest_number_for_what_is_larger():
    batch, pages = causal_batch([5], [4], 16, device=DEVICE)
    k = torch.tensor([447.0, 460.0, -5e4, 3.3e38], device=DEVICE)[:, None, None].expand(4, 4, 128)
    for dtype in (torch.float32, BF16):
        rows, pools = k.to(dtype).contiguous(), []
        for module in (write_kv, write_kv_ref):
            pool = torch.zeros(pages, 16, 4, 128, dtype=FP8, device=DEVICE)
            module.write_kv(rows, rows, pool, pool.clone(), batch)
            pools.append(pool.float())
        assert torch.equal(*pools) and pools[0].abs().max() == 448
    packed, scale = k.repeat(1, 3, 1).to(BF16), torch.ones(8, 128, device=DEVICE)
    pools = []
    for module in (norm_rope, norm_rope_ref):
        pool = torch.zeros(pages, 16, 4, 128, dtype=FP8, device=DEVICE)
        table = torch.ones(4, 128, device=DEVICE)
        module.norm_rope_write(packed, 600 * scale, table, table, 64, 1e-6, 4, pool, v := pool.clone(), None, 0, batch)
        pools.append((pool.float(), v.float()))
    for out, want in zip(*pools, strict=True):
        assert torch.equal(out, want) and out.abs().max() == 448


@pytest.mark.parametrize("rows", [1, 64, 1024])
def test_routes(rows):
    hidden, experts = (6144, 128) if DEVICE == "cuda" else (64, 16)
    x, gate = randn(rows, hidden, dtype=BF16), randn(experts, hidden, seed=1) * hidden**-0.5
    bias = 0.1 * randn(experts, seed=2)
    weights, ids = moe.route(x, gate, bias, 4, 2.0)
    want_weights, want_ids = moe_ref.route(x, gate, bias, 4, 2.0)
    same = (ids.sort(-1).values == want_ids.sort(-1).values).all(-1)
    assert same.float().mean() >= 0.995, "sums in another order: near ties may differ"
    dense, want = (torch.zeros(rows, experts, device=DEVICE) for _ in range(2))
    dense.scatter_(1, ids, weights), want.scatter_(1, want_ids, want_weights)
    torch.testing.assert_close(dense[same], want[same], rtol=2e-3, atol=2e-4)


def states(target, choice: str, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Logits of a prefill and of a tree behind it."""
    monkeypatch.setattr(ops, "override", choice)
    page, dtype = target.config.block_size, next(target.parameters()).dtype
    dtype = BF16 if dtype == BF16 else torch.float32
    length = 900 if DEVICE == "cuda" else 40
    prompt = [(37 * i * i + 11 * i) % 4000 for i in range(length)]
    table = [list(range((length + 32) // page + 1))]
    cache = PagedCache(target.config, len(table[0]) + 1, dtype=dtype, device=DEVICE)
    with torch.inference_mode():
        prefill = target(Batch.causal(page, DEVICE, [prompt], [0], table), cache).final_state
        depths, ancestors = [[0, 1, 1, 2, 3]], [[1, 3, 5, 11, 27]]
        tree = Batch.tree(page, DEVICE, [[5, 6, 7, 8, 9]], [length], table, depths, ancestors)
        return target.logits(torch.cat([prefill, target(tree, cache).final_state])).float()


def test_the_bundled_target_is_as_exact_as_bf16_allows(monkeypatch):
    exact = load_target(BUNDLED / "m3-tiny", device=DEVICE, dtype=torch.float32)
    rounded = load_target(BUNDLED / "m3-tiny", device=DEVICE, dtype=BF16)
    want = states(exact, "reference", monkeypatch)
    same = states(exact, "triton", monkeypatch)
    assert (same - want).norm() <= 1e-3 * want.norm()
    plain, out = (states(rounded, choice, monkeypatch) for choice in ("reference", "triton"))
    assert (out - want).norm() <= 2 * (plain - want).norm()
