"""The rectangular view of a batch that the reference implementations share: sequences padded to the same number of
rows and of slots.

Shapes: T rows, R sequences, M rows of the longest sequence, W pages of the longest sequence, B slots in a page, S = W
* B slots, C blocks (= W: a position never exceeds its slot).
"""

import torch
from torch import Tensor

from target_model.batch import Batch


class PaddedBatch:
    """What every layer needs again: which rows and pages to gather, which keys a row sees, which block a key belongs
    to.

    Worked out once for a batch and kept in `batch.derived`.
    """

    def __init__(self, batch: Batch):
        self.batch = batch
        self.sequences, self.rows = batch.num_sequences, batch.max_rows
        self.block = batch.page_size
        self.pages = -(-batch.max_context // self.block)
        self.slots = self.pages * self.block
        self.full = batch.num_rows == self.sequences * self.rows
        self.page_ids_RW = batch.block_table[:, : self.pages].reshape(-1).long()
        if not self.full:
            device = batch.token_ids.device
            start, end = batch.row_start[:-1, None].long(), batch.row_start[1:, None].long()
            rows_RM = start + torch.arange(self.rows, device=device)
            self.row_is_real_RM = rows_RM < end
            # A padded row repeats the sequence's last row: it computes something finite that nobody reads.
            self.row_ids_RM = torch.minimum(rows_RM, end - 1)
        self.visible_RMS = self._visible()
        self.hidden_RMS = torch.zeros(self.visible_RMS.shape, device=self.visible_RMS.device)
        self.hidden_RMS.masked_fill_(~self.visible_RMS, float("-inf"))
        self.from_zero = batch.ancestors is None and not bool(batch.committed.any())
        self._masks: dict[tuple, Tensor] = {}

    @classmethod
    def of(cls, batch: Batch) -> "PaddedBatch":
        """The view of this batch, made at the first call."""
        if "padded" not in batch.derived:
            batch.derived["padded"] = cls(batch)
        return batch.derived["padded"]

    def pad(self, x_T: Tensor) -> Tensor:
        """[T, ...] -> [R, M, ...]."""
        if self.full:
            return x_T.reshape(self.sequences, self.rows, *x_T.shape[1:])
        return x_T[self.row_ids_RM]

    def unpad(self, x_RM: Tensor) -> Tensor:
        """[R, M, ...] -> [T, ...]."""
        return x_RM.reshape(-1, *x_RM.shape[2:]) if self.full else x_RM[self.row_is_real_RM]

    def gather(self, pool_PB: Tensor, dtype: torch.dtype) -> Tensor:
        """The slots of every sequence, in order: [P, B, ...] -> [R, S, ...]. Slots behind a sequence's own hold
        anything.
        """
        pages = pool_PB.index_select(0, self.page_ids_RW).to(dtype)
        return pages.view(self.sequences, self.slots, *pool_PB.shape[2:])

    def _visible(self) -> Tensor:
        """bool [R, M, S]: the row may look at the key in that slot."""
        batch = self.batch
        slot_S = torch.arange(self.slots, device=batch.token_ids.device)
        if batch.ancestors is None:
            return slot_S <= self.pad(batch.slots)[..., None]
        scratch_RS = slot_S - batch.committed[:, None]
        bits = self.pad(batch.ancestors)[..., None] >> scratch_RS.clamp(0, 63)[:, None]
        return (scratch_RS < 0)[:, None] | ((bits & 1).bool() & (scratch_RS < 64)[:, None])

    def dense_mask(self, first_slot: int) -> Tensor:
        """0 where a key of slot >= first_slot is visible, else -inf: [R, 1, M, S]."""
        if first_slot == 0:
            return self.hidden_RMS[:, None]
        key = ("dense", first_slot)
        if key not in self._masks:
            mask_RMS = self.hidden_RMS.clone()
            mask_RMS[..., :first_slot] = float("-inf")
            self._masks[key] = mask_RMS[:, None]
        return self._masks[key]

    def key_blocks(self) -> Tensor:
        """int64 [R, S]: the block of the key in each slot, position // B. Only a tree's nodes lie in a slot that is
        not their position.
        """
        key = ("key_blocks",)
        if key not in self._masks:
            batch = self.batch
            blocks_RS = (torch.arange(self.slots, device=batch.slots.device) // self.block).repeat(self.sequences, 1)
            counts = batch.row_start[1:] - batch.row_start[:-1]
            sequence_T = torch.repeat_interleave(torch.arange(self.sequences, device=batch.slots.device), counts)
            blocks_RS[sequence_T, batch.slots] = batch.positions // self.block
            self._masks[key] = blocks_RS
        return self._masks[key]

    def forced_scores(self, init_blocks: int, local_blocks: int) -> tuple[Tensor, Tensor]:
        """(bool, fp32) [R, M, 1, C]: blocks chosen whatever their score, and the score that makes it so."""
        key = ("forced", init_blocks, local_blocks)
        if key not in self._masks:
            own = self.pad(self.batch.positions // self.block)[..., None, None]
            block_C = torch.arange(self.pages, device=own.device)
            local = (block_C > own - local_blocks) & (block_C <= own)
            init = (block_C < init_blocks) & (block_C <= own)
            scores = torch.where(init, 1e30, 1e29)
            self._masks[key] = (local | init, scores)
        return self._masks[key]


def attend(q_RMQD: Tensor, k_RSKD: Tensor, v_RSKD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Grouped-query softmax attention, [R, M, Q, D]. `mask` [R, 1 or K, M, S] is added to the scores; None: causal
    from slot 0.
    """
    sequences, rows, heads, dim = q_RMQD.shape
    kv_heads = k_RSKD.shape[2]
    group = heads // kv_heads
    # One kv head of one sequence is one batch entry, and its group of query heads the heads: no key is copied per
    # query head.
    q = q_RMQD.view(sequences, rows, kv_heads, group, dim).permute(0, 2, 3, 1, 4).flatten(0, 1)
    k = k_RSKD.transpose(1, 2).flatten(0, 1)[:, None].expand(-1, group, -1, -1)
    v = v_RSKD.transpose(1, 2).flatten(0, 1)[:, None].expand(-1, group, -1, -1)
    if mask is not None:
        mask = mask.to(q.dtype).expand(-1, kv_heads, -1, -1).flatten(0, 1)[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out.view(sequences, kv_heads, group, rows, dim).permute(0, 3, 1, 2, 4).flatten(2, 3)
