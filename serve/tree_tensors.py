"""Trees as tensors, where no host reads them: node 0 of each row is its root, parents come before children, and a root
is its own parent.

R trees, N nodes, D depth, F = D + 1.
"""

import torch
from torch import Tensor


def ancestry(parent_RN: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Depth of every node below its root, and the bit mask of itself and its ancestors, int64 [R, N] both."""
    index_N = torch.arange(parent_RN.shape[1], device=parent_RN.device)
    below_RN = (index_N > 0).long().expand_as(parent_RN)
    bit_N = torch.ones_like(index_N) << index_N
    depth_RN, mask_RN = torch.zeros_like(parent_RN), bit_N.expand_as(parent_RN)
    for _ in range(depth):
        depth_RN = (depth_RN.gather(1, parent_RN) + 1) * below_RN
        mask_RN = bit_N | mask_RN.gather(1, parent_RN)
    return depth_RN, mask_RN


def accepted(hit_RN: Tensor, parent_RN: Tensor, depth_RN: Tensor, depth: int) -> Tensor:
    """The accepted node of every depth, the root first and -1 behind the last, int64 [R, F]: a node is accepted when it
    is a hit and its parent is accepted. Siblings carry different tokens, so at most one of a depth is.
    """
    index_N = torch.arange(hit_RN.shape[1], device=hit_RN.device)
    root_N = index_N == 0
    accepted_RN = root_N.expand_as(hit_RN)
    for _ in range(depth):
        accepted_RN = root_N | (hit_RN & accepted_RN.gather(1, parent_RN))
    # Rejected nodes go to a column of their own, which is dropped.
    path_RF = torch.full((hit_RN.shape[0], depth + 2), -1, device=hit_RN.device)
    column_RN = torch.where(accepted_RN, depth_RN, depth + 1)
    return path_RF.scatter(1, column_RN, index_N.expand_as(column_RN))[:, : depth + 1]


def longest(depth_RN: Tensor, mask_RN: Tensor, live_RN: Tensor, wanted_R: Tensor) -> Tensor:
    """Hits that make the first `wanted` nodes of the first of the longest paths accepted."""
    deepest_R1 = torch.where(live_RN, depth_RN, -1).argmax(1, keepdim=True)
    index_N = torch.arange(depth_RN.shape[1], device=depth_RN.device)
    on_path_RN = ((mask_RN.gather(1, deepest_R1) >> index_N) & 1) == 1
    return on_path_RN & (depth_RN <= wanted_R[:, None])
