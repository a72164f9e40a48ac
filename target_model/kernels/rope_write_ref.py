"""Reference of `rope_write`. Shapes: T rows, Q query heads, K kv heads, D head dim, P pages, B slots, F = D / 2."""

import torch
from torch import Tensor

from target_model.batch import Batch
from target_model.kernels.write_kv_ref import write_kv


def rotate(x_TnD: Tensor, positions_T: Tensor, frequencies_F: Tensor) -> Tensor:
    """RoPE over the whole head (rotate-half). Angles come from the positions: there is no table that a long context
    outgrows. Any leading dimensions.
    """
    angles = positions_T[..., None, None].float() * frequencies_F
    cos, sin = angles.cos().to(x_TnD.dtype), angles.sin().to(x_TnD.dtype)
    first, second = x_TnD.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rope_write(
    packed_TnD: Tensor,
    frequencies_F: Tensor,
    num_heads: int,
    k_pool_PBKD: Tensor,
    v_pool_PBKD: Tensor,
    batch: Batch,
) -> Tensor:
    """Rotated queries [T, Q, D]; keys and values go to their slots. `frequencies_F` fp32 [D / 2]."""
    kv_heads = k_pool_PBKD.shape[2]
    turned, v_TKD = packed_TnD.split([num_heads + kv_heads, kv_heads], dim=1)
    q_TQD, k_TKD = rotate(turned, batch.positions, frequencies_F).split([num_heads, kv_heads], dim=1)
    write_kv(k_TKD, v_TKD, k_pool_PBKD, v_pool_PBKD, batch)
    return q_TQD
