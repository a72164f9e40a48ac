"""Reference of `norm_rope_write`. Shapes: T rows, Q query heads, K kv heads, J index heads, n packed heads, D head dim,
P pages, B slots."""

import torch
import torch.nn.functional as F
from torch import Tensor

from target_model.batch import Batch
from target_model.kernels.write_kv_ref import write_index_k, write_kv


def norm_rope_write(
    packed_TnD: Tensor,
    scale_nD: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    rotary_dim: int,
    eps: float,
    num_heads: int,
    k_pool_PBKD: Tensor,
    v_pool_PBKD: Tensor,
    index_pool_PBD: Tensor | None,
    index_heads: int,
    batch: Batch,
) -> tuple[Tensor, Tensor | None]:
    """Queries [T, Q, D] and index queries [T, J, D] (None without `index_pool`), normalised and rotated; keys and
    values are stored."""
    kv_heads, dim, half = k_pool_PBKD.shape[2], packed_TnD.shape[2], rotary_dim // 2
    used = num_heads + kv_heads + (index_heads + 1 if index_pool_PBD is not None else 0)
    normed_TnD = F.rms_norm(packed_TnD[:, :used].float(), (dim,), None, eps) * scale_nD[:used]
    swapped_TnD = torch.cat((normed_TnD[..., half : 2 * half], normed_TnD[..., :half], normed_TnD[..., 2 * half :]), -1)
    rotated_TnD = torch.addcmul(normed_TnD * cos_TD[:, None], swapped_TnD, sin_TD[:, None]).to(packed_TnD.dtype)
    write_kv(
        rotated_TnD[:, num_heads : num_heads + kv_heads], packed_TnD[:, -kv_heads:], k_pool_PBKD, v_pool_PBKD, batch
    )
    if index_pool_PBD is None:
        return rotated_TnD[:, :num_heads], None
    write_index_k(rotated_TnD[:, -1], index_pool_PBD, batch)
    return rotated_TnD[:, :num_heads], rotated_TnD[:, num_heads + kv_heads : -1]
