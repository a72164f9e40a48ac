"""One call of every public kernel entry with the shapes of MiniMax-M3 (few rows, few pages)."""

import torch

from target_model.kernels import paged_attention, select_blocks, sparse_attention, write_kv
from tests.target_model.kernels.batches import causal_batch, tree_batch

BF16 = torch.bfloat16
HEADS, KV, D, PAGE, TOP_K = 64, 4, 128, 128, 16


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


def draft_attention() -> None:
    batch, pages = decode_batch()
    k = empty(pages, PAGE, HEADS, D)
    paged_attention.paged_attention(empty(1, HEADS, D), k, k, batch, 0.1, first_slot=1)


def write() -> None:
    batch, pages = decode_batch()
    write_kv.write_kv(empty(1, KV, D), empty(1, KV, D), *2 * (empty(pages, PAGE, KV, D),), batch)


CASES = {
    "decode": lambda: attention(decode_batch),
    "decode fp8": lambda: attention(decode_batch, torch.float8_e4m3fn),
    "prefill": lambda: attention(prefill_batch),
    "tree": lambda: attention(tree_batch_64),
    "draft": draft_attention,
    "write": write,
}
