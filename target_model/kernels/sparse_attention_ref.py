"""Reference of `sparse_attention`. Shapes: T rows, Q query heads, K kv heads, D head dim, P pages, B slots, N chosen
blocks, C blocks; R, M, S as in padded_ref. Index head j chooses for kv head j."""

import torch
from torch import Tensor

from target_model.batch import Batch
from target_model.kernels.padded_ref import PaddedBatch, attend


def sparse_attention(
    q_TQD: Tensor,
    k_pool_PBKD: Tensor,
    v_pool_PBKD: Tensor,
    blocks_TKN: Tensor,
    batch: Batch,
    scale: float,
    first_slot: int = 0,
    scratch_chosen: bool = True,
) -> Tensor:
    """softmax(scale * q . k) v over the visible keys in slots >= first_slot whose position lies in a chosen block, [T,
    Q, D]. `blocks_TKN` is -1 padded.

    In a tree without `scratch_chosen`, visible scratch keys count as chosen; then some of them may come from earlier
    batches.
    """
    padded = PaddedBatch.of(batch)
    blocks_RMKN = padded.pad(blocks_TKN).long()
    # -1 falls into one column more than there are blocks.
    hidden = torch.full((*blocks_RMKN.shape[:3], padded.pages + 1), float("-inf"), device=q_TQD.device)
    hidden.scatter_(-1, blocks_RMKN % (padded.pages + 1), 0.0)
    hidden_RKMC = hidden[..., : padded.pages].transpose(1, 2)
    if batch.ancestors is None:
        hidden_RKMS = hidden_RKMC.repeat_interleave(padded.block, dim=-1)
    else:
        blocks_RS = padded.key_blocks()[:, None, None]
        hidden_RKMS = hidden_RKMC.gather(-1, blocks_RS.expand(*hidden_RKMC.shape[:3], -1))
        if not scratch_chosen:
            scratch_RS = torch.arange(padded.slots, device=q_TQD.device) >= batch.committed[:, None]
            hidden_RKMS = hidden_RKMS.masked_fill(scratch_RS[:, None, None], 0.0)
    mask = hidden_RKMS + padded.dense_mask(first_slot)
    k_RSKD = padded.gather(k_pool_PBKD, q_TQD.dtype)
    v_RSKD = padded.gather(v_pool_PBKD, q_TQD.dtype)
    return padded.unpad(attend(padded.pad(q_TQD), k_RSKD, v_RSKD, mask, scale))
