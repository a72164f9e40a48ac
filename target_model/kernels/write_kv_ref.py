"""Reference of `write_kv`: stores the rows' keys and values in their slots. Shapes: T rows, K kv heads, D head dim, P
pages, B slots.
"""

import torch
from torch import Tensor

from target_model.batch import Batch


def write_kv(k_TKD: Tensor, v_TKD: Tensor, k_pool_PBKD: Tensor, v_pool_PBKD: Tensor, batch: Batch) -> None:
    """Writes in place, rounded to the pool's dtype."""
    _write(k_TKD, k_pool_PBKD, batch)
    _write(v_TKD, v_pool_PBKD, batch)


def write_index_k(index_k_TD: Tensor, pool_PBD: Tensor, batch: Batch) -> None:
    """Writes the one index head's keys in place, rounded to the pool's dtype."""
    _write(index_k_TD, pool_PBD, batch)


def _write(rows_T: Tensor, pool_PB: Tensor, batch: Batch) -> None:
    if pool_PB.dtype == torch.float8_e4m3fn:
        # What lies beyond the largest number becomes that; some versions of torch would make it NaN.
        largest = torch.finfo(pool_PB.dtype).max
        rows_T = rows_T.clamp(-largest, largest)
    pool_PB.view(-1, *pool_PB.shape[2:])[batch.physical_slots] = rows_T.to(pool_PB.dtype)
