"""On a GPU, the shapes of MiniMax-M3 in bf16: error against fp32, 64-bit addressing, and a decode step in a CUDA
graph."""

from dataclasses import replace

import pytest
import torch

from target_model.kernels import (
    paged_attention,
    paged_attention_ref,
    select_blocks,
    select_blocks_ref,
    sparse_attention,
    sparse_attention_ref,
    write_kv,
)
from tests.target_model.kernels.batches import causal_batch, normal, poisoned_pool, tree_batch

pytestmark = pytest.mark.gpu
PAGE, DIM, HEADS, KV_HEADS, TOP_K = 128, 128, 64, 4, 16
BF16 = torch.bfloat16
BATCHES = {
    "decode": lambda: causal_batch([5, 3000, 2500], [1, 1, 1], PAGE, device="cuda"),
    "decode 20": lambda: causal_batch([5 + 150 * r for r in range(20)], [1] * 20, PAGE, device="cuda"),
    "prefill": lambda: causal_batch([0, 2400, 2431], [300, 130, 1], PAGE, device="cuda"),
    "tree 8": lambda: tree_batch([2555, 100], [8, 5], PAGE, device="cuda"),
    "tree 64": lambda: tree_batch([2555, 2700, 60], [64, 64, 33], PAGE, device="cuda"),
}


def relative(x, want) -> float:
    """Norm of the error over the norm of the truth; NaN stays NaN and fails every comparison."""
    return float((x.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize("kind", BATCHES)
def test_attention_error_is_at_most_twice_that_of_pytorch_in_bf16(kind):
    batch, pages = BATCHES[kind]()
    q = normal(batch, HEADS, DIM, dtype=BF16)
    k, v = (poisoned_pool(batch, pages, KV_HEADS, DIM, dtype=BF16, seed=s) for s in (2, 3))
    k0, v0 = k.nan_to_num(), v.nan_to_num()
    index_pool = poisoned_pool(batch, pages, DIM, dtype=BF16, seed=4)
    index_q = normal(batch, KV_HEADS, DIM, dtype=BF16, seed=5)

    blocks = select_blocks.select_blocks(index_q, index_pool, batch, TOP_K, 0, 1)
    exact = select_blocks_ref.select_blocks(index_q.float(), index_pool.nan_to_num().float(), batch, TOP_K, 0, 1)
    same = (blocks == exact).all(-1).float().mean()
    assert same > 0.99, f"{kind}: only {same:.3f} of the choices agree"  # sums in another order: near ties may differ

    for name, run, ref in (
        ("sparse", sparse_attention.sparse_attention, sparse_attention_ref.sparse_attention),
        ("dense", paged_attention.paged_attention, paged_attention_ref.paged_attention),
    ):
        extra = (blocks,) if name == "sparse" else ()
        want = ref(q.float(), k0.float(), v0.float(), *extra, batch, DIM**-0.5)
        plain = ref(q, k0, v0, *extra, batch, DIM**-0.5)
        error, allowed = relative(run(q, k, v, *extra, batch, DIM**-0.5), want), relative(plain, want)
        assert error <= 2 * allowed, f"{kind} {name}: {error} against {allowed}"


@pytest.mark.parametrize("kind", BATCHES)
def test_fp8_cache(kind):
    batch, pages = BATCHES[kind]()
    fp8 = torch.float8_e4m3fn
    q = normal(batch, HEADS, DIM, dtype=BF16)
    k, v = (poisoned_pool(batch, pages, KV_HEADS, DIM, dtype=fp8, seed=s) for s in (2, 3))
    index_pool = poisoned_pool(batch, pages, DIM, dtype=fp8, seed=4)
    blocks = select_blocks.select_blocks(
        normal(batch, KV_HEADS, DIM, dtype=BF16, seed=5), index_pool, batch, TOP_K, 0, 1
    )
    out = sparse_attention.sparse_attention(q, k, v, blocks, batch, 0.1)
    k0, v0 = k.float().nan_to_num(), v.float().nan_to_num()
    want = sparse_attention_ref.sparse_attention(q.float(), k0, v0, blocks, batch, 0.1)
    assert relative(out, want) < 0.01


@pytest.mark.parametrize("kind", BATCHES)
def test_pools_beyond_two_to_the_31_elements(kind):
    batch, pages = BATCHES[kind]()
    far = 131_072  # page ids from here on lie behind element 2^31 of the index pool, and far behind it in k and v
    q = normal(batch, HEADS, DIM, dtype=BF16)
    k, v = (poisoned_pool(batch, pages, KV_HEADS, DIM, dtype=BF16, seed=s) for s in (2, 3))
    index_pool = poisoned_pool(batch, pages, DIM, dtype=BF16, seed=4)
    index_q = normal(batch, KV_HEADS, DIM, dtype=BF16, seed=5)
    blocks = select_blocks.select_blocks(index_q, index_pool, batch, TOP_K, 0, 1)
    out = sparse_attention.sparse_attention(q, k, v, blocks, batch, 0.1)
    dense = paged_attention.paged_attention(q, k, v, batch, 0.1)

    used = torch.arange(batch.block_table.shape[1], device="cuda") * PAGE
    ends = batch.committed + (batch.row_start[1:] - batch.row_start[:-1])
    table = torch.where(used[None, :] < ends[:, None], batch.block_table + far, 0)
    moved = replace(batch, block_table=table.int(), physical_slots=batch.physical_slots + far * PAGE)
    big_index = torch.empty(far + pages, PAGE, DIM, dtype=BF16, device="cuda")
    big_index[far:] = index_pool
    assert torch.equal(select_blocks.select_blocks(index_q, big_index, moved, TOP_K, 0, 1), blocks)
    write_kv.write_index_k(index_q[:, 0], big_index, moved)
    assert torch.equal(big_index.view(-1, DIM)[moved.physical_slots], index_q[:, 0])
    del big_index
    far //= 4  # K and V hold four heads a slot
    moved = replace(moved, block_table=torch.where(used[None, :] < ends[:, None], batch.block_table + far, 0).int())
    big_k, big_v = (torch.empty(far + pages, PAGE, KV_HEADS, DIM, dtype=BF16, device="cuda") for _ in range(2))
    big_k[far:], big_v[far:] = k, v
    assert torch.equal(sparse_attention.sparse_attention(q, big_k, big_v, blocks, moved, 0.1), out)
    assert torch.equal(paged_attention.paged_attention(q, big_k, big_v, moved, 0.1), dense)


@pytest.mark.parametrize("kind", ["decode", "decode 20", "tree 8"])
def test_a_step_runs_in_a_cuda_graph(kind):
    """Again and again: what the parts of a row count on their way is zero behind every launch."""
    batch, pages = BATCHES[kind]()
    q = normal(batch, HEADS, DIM, dtype=BF16)
    k, v = (poisoned_pool(batch, pages, KV_HEADS, DIM, dtype=BF16, seed=s) for s in (2, 3))
    index_pool = poisoned_pool(batch, pages, DIM, dtype=BF16, seed=4)
    index_q = normal(batch, KV_HEADS, DIM, dtype=BF16, seed=5)

    def step():
        blocks = select_blocks.select_blocks(index_q, index_pool, batch, TOP_K, 0, 1)
        return sparse_attention.sparse_attention(q, k, v, blocks, batch, 0.1)

    want = step()
    assert torch.equal(step(), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)
    assert not sparse_attention.arrival_counters(q.device).any()
