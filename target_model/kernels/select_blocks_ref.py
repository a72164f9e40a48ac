"""Reference of `select_blocks`, MSA's indexer.

Shapes: T rows, J index heads, D head dim, P pages, B slots, N = top_k, C blocks, R, M, S as in padded_ref.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from target_model.batch import Batch
from target_model.kernels.padded_ref import PaddedBatch


def select_blocks(
    index_q_TJD: Tensor, index_k_pool_PBD: Tensor, batch: Batch, top_k: int, init_blocks: int, local_blocks: int
) -> Tensor:
    """The `top_k` blocks each row's index heads choose: int32 [T, J, N], ascending, -1 behind the last.

    score[b] = max of index_q . index_k over the visible keys whose position lies in block b; a block without one is
    never chosen. The first `init_blocks` blocks and the `local_blocks` blocks up to the row's own are chosen first,
    and count. Ties: the lower block.
    """
    padded = PaddedBatch.of(batch)
    q_RMJD = padded.pad(index_q_TJD).float()
    k_RSD = padded.gather(index_k_pool_PBD, torch.float32)
    scores_RMJS = (q_RMJD.flatten(1, 2) @ k_RSD.transpose(1, 2)).view(*q_RMJD.shape[:3], -1)
    scores_RMJS = scores_RMJS + padded.hidden_RMS[:, :, None]
    scores_RMJC = _block_max(scores_RMJS, padded)
    forced, forced_scores = padded.forced_scores(init_blocks, local_blocks)
    scores_RMJC = torch.where(forced, forced_scores, scores_RMJC)

    best, order = torch.sort(scores_RMJC, dim=-1, descending=True, stable=True)
    best, order = best[..., :top_k], order[..., :top_k]
    chosen = order.masked_fill(best == float("-inf"), padded.pages).sort(dim=-1).values
    chosen = padded.unpad(chosen.masked_fill(chosen == padded.pages, -1).int())
    return chosen if padded.pages >= top_k else F.pad(chosen, (0, top_k - padded.pages), value=-1)


def _block_max(scores_RMJS: Tensor, padded: PaddedBatch) -> Tensor:
    """The largest score of each block, [R, M, J, C]."""
    if padded.batch.ancestors is None:
        return scores_RMJS.unflatten(-1, (padded.pages, padded.block)).amax(-1)
    # A node's slot is not its position: its score goes to the block of its position.
    blocks = padded.key_blocks()[:, None, None].expand_as(scores_RMJS)
    empty = scores_RMJS.new_full((*scores_RMJS.shape[:3], padded.pages), float("-inf"))
    return empty.scatter_reduce(-1, blocks, scores_RMJS, "amax")
