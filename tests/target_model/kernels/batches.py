"""Random batches over a poisoned pool: every slot that no row may read holds NaN, pages are handed out in random
order."""

import random

import torch
from torch import Tensor

from target_model.batch import Batch


def block_tables(contexts: list[int], page: int, generator: random.Random) -> tuple[list[list[int]], int]:
    """Pages for each sequence, scattered, and the number of pages of the pool (some stay free)."""
    need = [-(-context // page) for context in contexts]
    ids = list(range(1, sum(need) + 4))
    generator.shuffle(ids)
    tables = []
    for count in need:
        tables.append([ids.pop() for _ in range(count)])
    return tables, sum(need) + 4


def causal_batch(
    starts: list[int], counts: list[int], page: int, *, device: str = "cpu", seed: int = 0
) -> tuple[Batch, int]:
    """Chunks of `counts` rows behind `starts` committed tokens; returns the batch and the pool's pages."""
    generator = random.Random(seed)
    tables, pages = block_tables([s + c for s, c in zip(starts, counts, strict=True)], page, generator)
    return Batch.causal(page, device, [[0] * count for count in counts], starts, tables), pages


def tree_batch(
    committed: list[int], counts: list[int], page: int, *, device: str = "cpu", seed: int = 0
) -> tuple[Batch, int]:
    """Random trees of `counts` nodes behind `committed` tokens."""
    generator = random.Random(seed)
    tables, pages = block_tables([s + c for s, c in zip(committed, counts, strict=True)], page, generator)
    depths, ancestors = [], []
    for count in counts:
        depth, mask = [0], [1]
        for node in range(1, count):
            parent = generator.randrange(max(0, node - 4), node)
            depth.append(depth[parent] + 1)
            mask.append(mask[parent] | (1 << node))
        depths.append(depth)
        ancestors.append(mask)
    tokens = [[0] * count for count in counts]
    return Batch.tree(page, device, tokens, committed, tables, depths, ancestors), pages


def poisoned_pool(batch: Batch, pages: int, *tail: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """[pages, B, *tail] with random values in the slots that the batch's sequences have written, NaN elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.full((pages, batch.page_size, *tail), float("nan"))
    for r, count in enumerate(batch.row_counts):
        for slot in range(int(batch.committed[r]) + count):
            page = int(batch.block_table[r, slot // batch.page_size])
            pool[page, slot % batch.page_size] = torch.randn(tail, generator=generator)
    return pool.to(dtype).to(batch.token_ids.device)


def normal(batch: Batch, *tail: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """Random rows [T, *tail]."""
    values = torch.randn(batch.num_rows, *tail, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).to(batch.token_ids.device)
