"""Reference of `paged_attention`. Shapes: T rows, Q query heads, K kv heads, D head dim, P pages, B slots, R, M, S as
in padded_ref.
"""

from torch import Tensor

from target_model.batch import Batch
from target_model.kernels.padded_ref import PaddedBatch, attend


def paged_attention(
    q_TQD: Tensor, k_pool_PBKD: Tensor, v_pool_PBKD: Tensor, batch: Batch, scale: float, first_slot: int = 0
) -> Tensor:
    """softmax(scale * q . k) v over the visible keys in slots >= first_slot, [T, Q, D]. Rows must see at least one
    key.
    """
    padded = PaddedBatch.of(batch)
    k_RSKD = padded.gather(k_pool_PBKD, q_TQD.dtype)
    v_RSKD = padded.gather(v_pool_PBKD, q_TQD.dtype)
    if padded.from_zero and first_slot == 0:
        k_RSKD, v_RSKD, mask = k_RSKD[:, : padded.rows], v_RSKD[:, : padded.rows], None
    else:
        mask = padded.dense_mask(first_slot)
    return padded.unpad(attend(padded.pad(q_TQD), k_RSKD, v_RSKD, mask, scale))
