"""Reference of `commit_rows`. Shapes: L layers, S sparse layers, P pages, B slots, K kv heads, D head dim, R sequences,
M longest path."""

import torch
from torch import Tensor

from target_model.batch import Batch


def commit_rows(k_LPBKD: Tensor, v_LPBKD: Tensor, index_SPBD: Tensor, path_RM: Tensor, batch: Batch) -> None:
    """In place. A gather finishes before its scatter begins, so every row is read before any is written; rows that are
    where they belong stay out of both."""
    move = torch.arange(path_RM.shape[1], device=path_RM.device).expand_as(path_RM)
    live = (path_RM >= 0) & (path_RM != move + 1)
    sequence = torch.arange(path_RM.shape[0], device=path_RM.device)[:, None].expand_as(path_RM)[live]
    committed = batch.committed[sequence].long()

    def physical(slot: Tensor) -> Tensor:
        return batch.block_table[sequence, slot // batch.page_size].long() * batch.page_size + slot % batch.page_size

    source, target = physical(committed + path_RM[live]), physical(committed + 1 + move[live])
    for pool in (k_LPBKD, v_LPBKD, index_SPBD):
        rows = pool.flatten(1, 2)
        rows[:, target] = rows[:, source]
