"""The rows of one forward pass, passed explicitly to every layer: there is no global attention context.

T rows, R sequences. A sequence's keys lie in logical *slots*; a page of the cache holds `page_size` consecutive slots.
Slots below `committed` hold decided tokens, whose position equals their slot. Slots from `committed` on are scratch:
the rows of a prefill chunk, or the nodes of a tree, where slot and position differ.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

MAX_SCRATCH = 64  # ancestors are one 64-bit mask


@dataclass(frozen=True)
class Batch:
    """One forward pass over R sequences whose rows are adjacent.

    token_ids       int64 [T]
    positions       int64 [T]   logical position of a row: RoPE, and its sparse block (position // page_size)
    slots           int64 [T]   logical slot where the row's keys and values go
    physical_slots  int64 [T]   page * page_size + offset of that slot in the pool
    row_start       int32 [R+1] rows of sequence r are row_start[r] : row_start[r + 1]
    committed       int32 [R]   keys in slots below it are visible to every row of the sequence
    block_table     int32 [R, W] page ids by logical page; entries behind a sequence's last page are 0 and never read
    ancestors       int64 [T] or None. None: causal, a row also sees the batch's rows of its sequence up to itself.
                    Otherwise bit j set: the key in slot committed + j is visible (the row's own bit is set)
    row_counts      rows of each sequence, on the host
    max_context     largest slot count, committed and scratch, of any sequence, on the host: bounds the kernels' grids
    page_size       slots in a page = tokens in a sparse block
    image_rows      int64 [M] or None: rows of this batch that show a part of an image. Their token id is the
                    placeholder of the kind; what the target reads instead is `image_features` [M, H]
    derived         what kernels work out from the fields above once for all layers (masks, tile lists), by name
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    physical_slots: Tensor
    row_start: Tensor
    committed: Tensor
    block_table: Tensor
    ancestors: Tensor | None
    row_counts: tuple[int, ...]
    max_context: int
    page_size: int
    image_rows: Tensor | None = None
    image_features: Tensor | None = None
    derived: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        return len(self.row_counts)

    @property
    def max_rows(self) -> int:
        return max(self.row_counts)

    @staticmethod
    def causal(
        page_size: int,
        device: torch.device | str,
        token_ids: Sequence[Sequence[int]],
        starts: Sequence[int],
        block_tables: Sequence[Sequence[int]],
    ) -> "Batch":
        """Chunks of consecutive tokens: sequence r brings `token_ids[r]` for slots (and positions) from `starts[r]`."""
        positions = [start + i for start, ids in zip(starts, token_ids, strict=True) for i in range(len(ids))]
        return Batch.build(page_size, device, token_ids, starts, block_tables, positions, positions, None)

    @staticmethod
    def whole(page_size: int, token_ids_RS: Tensor) -> "Batch":
        """R sequences of S tokens from position 0 on, each in its own consecutive pages; made without leaving the
        device.
        """
        sequences, length = token_ids_RS.shape
        device = token_ids_RS.device
        pages = -(-length // page_size)
        positions = torch.arange(length, device=device)
        first_slot = torch.arange(sequences, device=device)[:, None] * pages * page_size
        return Batch(
            token_ids=token_ids_RS.flatten(),
            positions=positions.repeat(sequences),
            slots=positions.repeat(sequences),
            physical_slots=(first_slot + positions).flatten(),
            row_start=torch.arange(0, sequences * length + 1, length, dtype=torch.int32, device=device),
            committed=torch.zeros(sequences, dtype=torch.int32, device=device),
            block_table=torch.arange(sequences * pages, dtype=torch.int32, device=device).view(sequences, pages),
            ancestors=None,
            row_counts=(length,) * sequences,
            max_context=length,
            page_size=page_size,
        )

    @staticmethod
    def grid(
        page_size: int,
        token_ids_RN: Tensor,
        positions_RN: Tensor,
        slots_RN: Tensor,
        committed_R: Tensor,
        block_table_RW: Tensor,
        ancestors_RN: Tensor | None,
        max_context: int,
    ) -> "Batch":
        """R sequences of N rows each, from tensors that are where the batch is to be: nothing leaves the device.

        Integers of any type; the table is int32. `max_context` may be more than there is, up to W * page_size.
        """
        sequences, rows = token_ids_RN.shape
        page_RN = block_table_RW.gather(1, slots_RN.long() // page_size)
        return Batch(
            token_ids=token_ids_RN.flatten(),
            positions=positions_RN.flatten(),
            slots=slots_RN.flatten(),
            physical_slots=(page_RN.long() * page_size + slots_RN % page_size).flatten(),
            row_start=_row_starts(sequences, rows, token_ids_RN.device),
            committed=committed_R.to(torch.int32),
            block_table=block_table_RW,
            ancestors=None if ancestors_RN is None else ancestors_RN.flatten(),
            row_counts=(rows,) * sequences,
            max_context=max_context,
            page_size=page_size,
        )

    def columns(self, first: int, count: int) -> "Batch":
        """Of a grid, only the rows first .. first + count - 1 of each sequence."""
        sequences = self.num_sequences

        def cut(row_T: Tensor) -> Tensor:
            return row_T.view(sequences, -1)[:, first : first + count].flatten()

        return replace(
            self,
            token_ids=cut(self.token_ids),
            positions=cut(self.positions),
            slots=cut(self.slots),
            physical_slots=cut(self.physical_slots),
            row_start=_row_starts(sequences, count, self.token_ids.device),
            ancestors=None if self.ancestors is None else cut(self.ancestors),
            row_counts=(count,) * sequences,
        )

    @staticmethod
    def tree(
        page_size: int,
        device: torch.device | str,
        token_ids: Sequence[Sequence[int]],
        committed: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        depths: Sequence[Sequence[int]],
        ancestors: Sequence[Sequence[int]],
    ) -> "Batch":
        """Trees: node i of sequence r sits in slot committed[r] + i at position committed[r] + depths[r][i].

        `ancestors[r][i]` has bit j set when node j is i itself or one of its ancestors (Python ints below 2^64).
        """
        positions = [start + depth for start, row in zip(committed, depths, strict=True) for depth in row]
        slots = [start + i for start, row in zip(committed, depths, strict=True) for i in range(len(row))]
        masks = [signed64(mask) for row in ancestors for mask in row]
        return Batch.build(page_size, device, token_ids, committed, block_tables, positions, slots, masks)

    @staticmethod
    def build(
        page_size: int,
        device: torch.device | str,
        token_ids: Sequence[Sequence[int]],
        committed: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        positions: Sequence[int],
        slots: Sequence[int],
        ancestors: Sequence[int] | None,
    ) -> "Batch":
        """From host lists: `positions`, `slots` and `ancestors` are flat, one entry a row."""
        counts = tuple(len(ids) for ids in token_ids)
        row_start, ends, physical = [0], [], []
        row = 0
        for count, start, pages in zip(counts, committed, block_tables, strict=True):
            end = start
            for slot in slots[row : row + count]:
                physical.append(pages[slot // page_size] * page_size + slot % page_size)
                end = max(end, slot + 1)
            row += count
            row_start.append(row)
            ends.append(end)
        width = max(len(pages) for pages in block_tables)
        table = [list(pages) + [0] * (width - len(pages)) for pages in block_tables]

        def tensor(values: Sequence, dtype: torch.dtype = torch.int64) -> Tensor:
            host = torch.tensor(values, dtype=dtype)
            return host if str(device) == "cpu" else host.pin_memory().to(device, non_blocking=True)

        return Batch(
            token_ids=tensor([token for ids in token_ids for token in ids]),
            positions=tensor(positions),
            slots=tensor(slots),
            physical_slots=tensor(physical),
            row_start=tensor(row_start, torch.int32),
            committed=tensor(committed, torch.int32),
            block_table=tensor(table, torch.int32),
            ancestors=None if ancestors is None else tensor(ancestors),
            row_counts=counts,
            max_context=max(ends),
            page_size=page_size,
        )


@functools.cache
def _row_starts(sequences: int, rows: int, device: torch.device) -> Tensor:
    """int32 [R + 1]."""
    with torch.inference_mode(False):  # kept for others, who may need gradients
        return torch.arange(0, sequences * rows + 1, rows, dtype=torch.int32, device=device)


def signed64(number: int) -> int:
    """The int64 with the last 64 bits of a mask or a seed."""
    bits = number % (1 << 64)
    return bits - (1 << 64) if bits >> 63 else bits
