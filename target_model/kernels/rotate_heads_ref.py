"""Reference of `rotate_heads`. Shapes as there."""

from torch import Tensor

from target_model.kernels.rope_write_ref import rotate


def rotate_heads(
    packed_TnD: Tensor, positions_T: Tensor, frequencies_F: Tensor, num_heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, Q, D], k and v [T, K, D]; T any leading dimensions."""
    turned, v_TKD = packed_TnD.split([num_heads + kv_heads, kv_heads], dim=-2)
    q_TQD, k_TKD = rotate(turned, positions_T, frequencies_F).split([num_heads, kv_heads], dim=-2)
    return q_TQD, k_TKD, v_TKD
