"""The attention and indexer kernels against their references, on small ragged shapes with NaN in every slot nobody may
read."""

from dataclasses import replace
from unittest.mock import MagicMock

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
    write_kv_ref,
)
from tests.target_model.kernels.batches import causal_batch, normal, poisoned_pool, tree_batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

BATCHES = {
    "decode": lambda page: causal_batch([5, 70, 33], [1, 1, 1], page, device=DEVICE),
    "prefill": lambda page: causal_batch([0, 41, 3], [19, 6, 1], page, device=DEVICE),
    "tree": lambda page: tree_batch([61, 0, 30], [9, 5, 20], page, device=DEVICE),
    "root": lambda page: tree_batch([61, 16], [1, 1], page, device=DEVICE),
}


def clean(pool):
    """The reference computes 0 * NaN for hidden slots: it gets zeros where the kernel gets NaN."""
    return pool.float().nan_to_num().to(pool.dtype)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize(("page", "dim", "heads", "kv_heads"), [(16, 32, 8, 2), (32, 64, 16, 1)])
def test_paged_attention(kind, page, dim, heads, kv_heads):
    batch, pages = BATCHES[kind](page)
    q = normal(batch, heads, dim)
    k, v = (poisoned_pool(batch, pages, kv_heads, dim, seed=s) for s in (2, 3))
    out = paged_attention.paged_attention(q, k, v, batch, dim**-0.5)
    want = paged_attention_ref.paged_attention(q, clean(k), clean(v), batch, dim**-0.5)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_batches_of_all_sizes_share_kernels(monkeypatch):
    """Each set of compile-time constants takes seconds to compile, when somebody waits for an answer."""
    constants = []

    def record(*_, **options):
        constants.append({name: value for name, value in options.items() if name.isupper() and name != "SPLITS"})

    launch = MagicMock()
    launch.__getitem__.return_value = record
    for name in ("attention_kernel", "combine_kernel"):
        monkeypatch.setattr(paged_attention, name, launch)
    for rows in ([1], [1, 1, 1], [1] * 7, [3, 2], [4]):
        batch, pages = causal_batch([200] * len(rows), rows, 16)
        k, v = (poisoned_pool(batch, pages, 2, 32, seed=s) for s in (2, 3))
        paged_attention.run_attention(
            normal(batch, 8, 32), k, v, batch, 1.0, **paged_attention.dense_shape(batch, 2, 4) | {"splits": 1}
        )
    assert len(constants) == 5 and all(each == constants[0] for each in constants)


@pytest.mark.parametrize("kind", ["decode", "prefill", "tree"])
def test_paged_attention_first_slot(kind):
    batch, pages = BATCHES[kind](16)
    if kind == "prefill":
        batch, pages = causal_batch([1, 41], [19, 6], 16, device=DEVICE)
    if kind == "tree":
        batch, pages = tree_batch([61, 16], [9, 5], 16, device=DEVICE)
    q = normal(batch, 4, 32)
    k, v = (poisoned_pool(batch, pages, 4, 32, seed=s) for s in (2, 3))
    for r in range(batch.num_sequences):
        k[batch.block_table[r, 0], 0] = v[batch.block_table[r, 0], 0] = 1e4
    out = paged_attention.paged_attention(q, k, v, batch, 0.2, first_slot=1)
    want = paged_attention_ref.paged_attention(q, clean(k), clean(v), batch, 0.2, first_slot=1)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize(("page", "dim", "index_heads"), [(16, 32, 2), (32, 128, 4)])
@pytest.mark.parametrize(("top_k", "init", "local"), [(2, 0, 1), (3, 1, 2)])
def test_select_blocks(kind, page, dim, index_heads, top_k, init, local):
    batch, pages = BATCHES[kind](page)
    q = normal(batch, index_heads, dim)
    pool = poisoned_pool(batch, pages, dim, seed=4)
    out = select_blocks.select_blocks(q, pool, batch, top_k, init, local)
    want = select_blocks_ref.select_blocks(q, clean(pool), batch, top_k, init, local)
    assert torch.equal(out, want)


@pytest.mark.parametrize("kind", ["decode", "tree"])
def test_select_blocks_takes_the_lower_of_equal_blocks(kind):
    batch, pages = (
        causal_batch([90], [1], 16, device=DEVICE) if kind == "decode" else tree_batch([90], [12], 16, device=DEVICE)
    )
    q = normal(batch, 2, 32)
    pool = poisoned_pool(batch, pages, 32) * 0 + 1.0  # every key scores the same
    out = select_blocks.select_blocks(q, pool, batch, 3, 0, 1)
    own = (batch.positions // 16).int()
    assert torch.equal(out[:, 0], torch.stack((own * 0, own * 0 + 1, own), 1))
    assert torch.equal(out, select_blocks_ref.select_blocks(q, clean(pool), batch, 3, 0, 1))


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize(("page", "dim", "heads", "kv_heads", "top_k"), [(16, 32, 8, 2, 3), (32, 64, 16, 1, 2)])
def test_sparse_attention(kind, page, dim, heads, kv_heads, top_k):
    batch, pages = BATCHES[kind](page)
    q = normal(batch, heads, dim)
    k, v = (poisoned_pool(batch, pages, kv_heads, dim, seed=s) for s in (2, 3))
    index_pool = clean(poisoned_pool(batch, pages, dim, seed=4))
    blocks = select_blocks_ref.select_blocks(normal(batch, kv_heads, dim, seed=5), index_pool, batch, top_k, 0, 1)
    out = sparse_attention.sparse_attention(q, k, v, blocks, batch, dim**-0.5)
    want = sparse_attention_ref.sparse_attention(q, clean(k), clean(v), blocks, batch, dim**-0.5)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", BATCHES)
def test_sparse_attention_of_a_draft(kind):
    """Slot 0 holds nothing, and the guessed rows an earlier step wrote are seen by their bits, chosen or not."""
    batch, pages = BATCHES[kind](16)
    q = normal(batch, 8, 32)
    k, v = (poisoned_pool(batch, pages, 4, 32, seed=s) for s in (2, 3))
    index_pool = clean(poisoned_pool(batch, pages, 32, seed=4))
    blocks = select_blocks_ref.select_blocks(normal(batch, 4, 32, seed=5), index_pool, batch, 3, 0, 1)
    if batch.ancestors is not None:
        # The last committed tokens become what an earlier step wrote: of three the first and the last are seen.
        back_R = batch.committed.clamp(max=3)
        back_T = back_R.repeat_interleave(torch.tensor(batch.row_counts)).long()
        ancestors = (batch.ancestors << back_T) | (0b101 & ((1 << back_T) - 1))
        batch = replace(batch, committed=batch.committed - back_R, ancestors=ancestors)
    options = {"first_slot": int(batch.ancestors is None or int(batch.committed.min()) > 0), "scratch_chosen": False}
    out = sparse_attention.sparse_attention(q, k, v, blocks, batch, 0.2, **options)
    want = sparse_attention_ref.sparse_attention(q, clean(k), clean(v), blocks, batch, 0.2, **options)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("block_t", "splits"), [(8, 1), (4, 2)])
def test_tiles_and_splits_do_not_change_a_tree(block_t, splits):
    batch, pages = tree_batch([61, 30], [5, 11], 16, device=DEVICE)
    q = normal(batch, 8, 32)
    k, v = (poisoned_pool(batch, pages, 2, 32, seed=s) for s in (2, 3))
    index_pool = clean(poisoned_pool(batch, pages, 32, seed=4))
    blocks = select_blocks_ref.select_blocks(normal(batch, 2, 32, seed=5), index_pool, batch, 3, 0, 1)
    out, lse = sparse_attention.tiled(q, k, v, blocks, batch, 0.2, block_t=block_t, splits=splits)
    want, want_lse = sparse_attention.tiled(q, k, v, blocks, batch, 0.2, block_t=2, splits=1)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)
    exact = sparse_attention_ref.sparse_attention(q, clean(k), clean(v), blocks, batch, 0.2)
    torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["decode", "tree"])
@pytest.mark.parametrize(("parts", "last"), [(1, False), (3, False), (4, True)])
def test_rows_for_themselves(kind, parts, last):
    batch, pages = BATCHES[kind](16)
    q = normal(batch, 8, 32)
    k, v = (poisoned_pool(batch, pages, 2, 32, seed=s) for s in (2, 3))
    index_pool = clean(poisoned_pool(batch, pages, 32, seed=4))
    blocks = select_blocks_ref.select_blocks(normal(batch, 2, 32, seed=5), index_pool, batch, 3, 0, 1)
    want = sparse_attention_ref.sparse_attention(q, clean(k), clean(v), blocks, batch, 0.2)
    for _ in range(2):  # the counters are as they were
        out, _ = sparse_attention.by_rows(q, k, v, blocks, batch, 0.2, parts=parts, last=last)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_write_kv():
    batch, pages = BATCHES["prefill"](16)
    dtype = (
        torch.bfloat16 if DEVICE == "cuda" else torch.float32
    )  # the interpreter does not round to bf16 as torch does
    packed = normal(batch, 6, 32)
    pools = [torch.zeros(pages, 16, 2, 32, dtype=dtype, device=DEVICE) for _ in range(4)]
    write_kv.write_kv(packed[:, 1:3], packed[:, 4:], pools[0], pools[1], batch)
    write_kv_ref.write_kv(packed[:, 1:3], packed[:, 4:], pools[2], pools[3], batch)
    assert torch.equal(pools[0], pools[2])
    assert torch.equal(pools[1], pools[3])
    index_pools = [torch.zeros(pages, 16, 32, dtype=dtype, device=DEVICE) for _ in range(2)]
    write_kv.write_index_k(packed[:, 3], index_pools[0], batch)
    write_kv_ref.write_index_k(packed[:, 3], index_pools[1], batch)
    assert torch.equal(*index_pools)
