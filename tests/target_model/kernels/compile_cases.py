"""One call of every public kernel entry with the shapes of MiniMax-M3 (few rows, few pages)."""

import torch

from target_model.kernels import (
    commit_rows,
    gumbel,
    linear_kl,
    moe,
    norm_rope,
    norms,
    own_column,
    packed_products,
    paged_attention,
    rope_write,
    rotate_heads,
    sample_tokens,
    select_blocks,
    silu_product,
    sparse_attention,
    top_rows,
    write_kv,
)
from target_model.quantised import QuantisedWeight
from target_model.quantised_formats import MXFP4, MXFP8, NVFP4, Format
from tests.target_model.kernels.batches import causal_batch, tree_batch

BF16 = torch.bfloat16
HEADS, KV, D, PAGE, TOP_K = 64, 4, 128, 128, 16
HIDDEN, WIDTH = 6144, 3072


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def decode_batch():
    return causal_batch([4000], [1], PAGE)


def prefill_batch():
    return causal_batch([2300], [64], PAGE)


def tree_batch_64():
    return tree_batch([4000], [64], PAGE)


def attention(make, dtype: torch.dtype = BF16) -> None:
    batch, pages = make()
    rows = batch.num_rows
    k = empty(pages, PAGE, KV, D, dtype=dtype)
    blocks = select_blocks.select_blocks(empty(rows, KV, D), empty(pages, PAGE, D, dtype=dtype), batch, TOP_K, 0, 1)
    sparse_attention.sparse_attention(empty(rows, HEADS, D), k, k, blocks, batch, 0.1)
    paged_attention.paged_attention(empty(rows, HEADS, D), k, k, batch, 0.1)


def small_attention() -> None:
    """The bundled small target: pages of 16, head dim 32, groups of 4, 8 chosen blocks."""
    trees = tree_batch([400], [24], 16), tree_batch([400], [4], 16), tree_batch([400, 70], [3, 2], 16)
    for batch, pages in (causal_batch([400], [1], 16), causal_batch([130], [70], 16), *trees):
        k = empty(pages, 16, 2, 32)
        q, index_q = empty(batch.num_rows, 8, 32), empty(batch.num_rows, 2, 32)
        blocks = select_blocks.select_blocks(index_q, empty(pages, 16, 32), batch, 8, 0, 1)
        sparse_attention.sparse_attention(q, k, k, blocks, batch, 0.1)
        paged_attention.paged_attention(q, k, k, batch, 0.1)


def draft_attention() -> None:
    batch, pages = decode_batch()
    k = empty(pages, PAGE, HEADS, D)
    paged_attention.paged_attention(empty(1, HEADS, D), k, k, batch, 0.1, first_slot=1)
    rope_write.rope_write(empty(1, 3 * HEADS, D), empty(D // 2, dtype=torch.float32), HEADS, k, k, batch)
    silu_product.silu_product(empty(1, 2 * 18432))


def write() -> None:
    batch, pages = decode_batch()
    write_kv.write_kv(empty(1, KV, D), empty(1, KV, D), *2 * (empty(pages, PAGE, KV, D),), batch)


def norm_and_rope() -> None:
    batch, pages = decode_batch()
    table = empty(1, D, dtype=torch.float32)
    pools = (empty(pages, PAGE, KV, D), empty(pages, PAGE, KV, D), empty(pages, PAGE, D))
    scale = empty(HEADS + 2 * KV + 1, D, dtype=torch.float32)
    norm_rope.norm_rope_write(empty(1, 77, D), scale, table, table, 64, 1e-6, HEADS, *pools, KV, batch)


def row_norms() -> None:
    x, scale = empty(2, HIDDEN), empty(HIDDEN, dtype=torch.float32)
    norms.add_norm(x, x, scale, 1e-6)
    norms.dual_norm(x, x, scale, scale, 1e-6)


def packed(form: Format, *shape: int) -> QuantisedWeight:
    return QuantisedWeight(shape, form).to_empty(device="cpu")  # never touched


def packed_experts(rows: int) -> None:
    for form in (MXFP4, MXFP8, NVFP4):
        weights = packed(form, 128, 2 * WIDTH, HIDDEN), packed(form, 128, HIDDEN, WIDTH)
        shares, chosen = empty(rows, 4, dtype=torch.float32), torch.zeros(rows, 4, dtype=torch.int64)
        moe.grouped_experts(empty(rows, HIDDEN), *weights, shares, chosen, 1.7, 7.0, 1.0)


def wide_experts() -> None:
    for form, name in ((MXFP4, "e2m1"), (MXFP8, "e4m3")):
        weights = packed(form, 128, 2 * WIDTH, HIDDEN), packed(form, 128, HIDDEN, WIDTH)
        shares, chosen = empty(8, 4, dtype=torch.float32), torch.zeros(8, 4, dtype=torch.int64)
        moe.run_experts(empty(8, HIDDEN), *weights, shares, chosen, 1.7, 7.0, 1.0, tile=moe.wide_shape(name))


def packed_dense(rows: int) -> None:
    for form in (MXFP4, MXFP8):
        x, w13, w2 = empty(rows, HIDDEN), packed(form, 2 * WIDTH, HIDDEN), packed(form, HIDDEN, WIDTH)
        packed_products.linear(x, w13)
        packed_products.mlp(x, w13, w2, 1.7, 7.0, 1.0)


def experts(rows: int) -> None:
    gate, bias = empty(128, HIDDEN, dtype=torch.float32), empty(128, dtype=torch.float32)
    weights, chosen = moe.route(empty(rows, HIDDEN), gate, bias, 4, 2.0)
    w13 = torch.empty(128, 2 * WIDTH, HIDDEN, dtype=BF16)  # never touched
    moe.grouped_experts(
        empty(rows, HIDDEN), w13, torch.empty(128, HIDDEN, WIDTH, dtype=BF16), weights, chosen, 1.7, 7.0, 1.0
    )


def commit() -> None:
    batch, pages = tree_batch_64()
    k, path = empty(3, pages, PAGE, KV, D), torch.zeros(1, 5, dtype=torch.int64)
    commit_rows.commit_rows(k, k, empty(2, pages, PAGE, D), path, batch)


def sample() -> None:
    floats, ids = torch.ones(2), torch.ones(2, dtype=torch.int64)
    sample_tokens.sample_tokens(
        empty(2, 200_064, dtype=torch.float32), floats, ids.int(), floats, floats, ids, ids, ids
    )


def noise() -> None:
    ids = torch.ones(2, dtype=torch.int64)
    gumbel.gumbel_at(ids, ids, ids, torch.ones(2, 64, dtype=torch.int64))


def best_entries() -> None:
    for k, dtype in ((4, BF16), (64, torch.float32)):
        top_rows.top_rows(empty(2, 200_064, dtype=dtype), k)
    ids, tokens = torch.ones(2, dtype=torch.int64), torch.ones(32_000, dtype=torch.int64)
    top_rows.noisy_top_rows(empty(2, 200_064), 4, torch.ones(2), ids, ids, ids)
    top_rows.noisy_top_rows(empty(2, 32_000), 4, torch.ones(2), ids, ids, ids, tokens)


def training_loss() -> None:
    state = empty(2, 32).requires_grad_()
    linear_kl.linear_kl(state, empty(200_064, 32), empty(2, 32), empty(200_064, 32), torch.ones(2))
    linear_kl.scaled(empty(200_064, 32, dtype=torch.float32), torch.ones(()), BF16)


def own_column_merge() -> None:
    q, k = empty(2, 64, D), [empty(2, 64, D)]
    lse = torch.zeros(2, 64)
    own_column.merge_column(q, q, lse, k, k, 1.0)
    own_column.column_gradient(q, q, q, lse, q, k, k, 1.0)


def layer_gradients() -> None:
    packed = empty(2, 192, 128).requires_grad_()
    rotated = rotate_heads.rotate_heads(packed, torch.zeros(2, dtype=torch.int64), torch.zeros(64), 64, 64)
    sum(part.sum() for part in rotated).backward()
    silu_product.silu_product(empty(2, 2 * 18432).requires_grad_()).sum().backward()


CASES = {
    "decode": lambda: attention(decode_batch),
    "decode fp8": lambda: attention(decode_batch, torch.float8_e4m3fn),
    "prefill": lambda: attention(prefill_batch),
    "tree": lambda: attention(tree_batch_64),
    "small": small_attention,
    "draft": draft_attention,
    "write": write,
    "norm and rope": norm_and_rope,
    "row norms": row_norms,
    "commit": commit,
    "sample": sample,
    "noise": noise,
    "best entries": best_entries,
    "training loss": training_loss,
    "own column": own_column_merge,
    "layer gradients": layer_gradients,
    "packed dense 1": lambda: packed_dense(1),
    "packed dense 64": lambda: packed_dense(64),
    "packed dense 600": lambda: packed_dense(600),
    "packed experts 1": lambda: packed_experts(1),
    "packed experts 4": lambda: packed_experts(4),
    "packed experts 1024": lambda: packed_experts(1024),
    "wide experts": wide_experts,
    "experts 1": lambda: experts(1),
    "experts 1024": lambda: experts(1024),
    "experts 8192": lambda: experts(8192),
}
