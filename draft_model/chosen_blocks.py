"""A draft that attends sparsely, to the blocks that a layer of the target has already chosen: its cost then does not
grow with the context.

The row of the token at position t goes by the target's choice at position t - 1, as its features do, and its own block.
Guessed rows go by the list of the root they grow from, and see all of their guessed ancestors.

T rows, J index heads of the target, K kv heads of the draft, N blocks the target chooses, B tokens in a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_model.config import DraftConfig
from target_model.batch import Batch
from target_model.cache import PagedCache
from target_model.config import M3Config
from target_model.errors import UserError
from target_model.model import Recorder, TargetModel, TargetOutput


@dataclass(frozen=True)
class ChosenBlocks:
    """Whose choice it is, and between which heads it is shared out: draft head k goes by index head k * J // K."""

    layer: int
    index_heads: int
    kv_heads: int
    top_k: int
    block_size: int

    @staticmethod
    def parse(text: str, target: M3Config, draft: DraftConfig) -> "ChosenBlocks | None":
        """From "full" (None), "sparse" (the target's last sparse layer) or "sparse:LAYER", counted from 0. Raises
        UserError where that is impossible.
        """
        kind, colon, number = text.partition(":")
        if text not in ("full", "sparse") and not (kind == "sparse" and number.isdecimal()):
            raise UserError(f"draft attention must be full, sparse or sparse:LAYER, got {text!r}")
        if kind == "full":
            return None
        sparse = [place for place, is_sparse in enumerate(target.sparse_layers) if is_sparse]
        if not sparse:
            raise UserError("sparse draft attention: the target has no sparse layer to choose blocks")
        layer = int(number) if colon else sparse[-1]
        if layer not in sparse:
            raise UserError(f"sparse draft attention: layer {layer} of the target chooses no blocks, {sparse} do")
        if draft.num_kv_heads % target.num_index_heads:
            raise UserError(
                f"sparse draft attention: the draft's {draft.num_kv_heads} kv heads cannot share the choices of "
                f"{target.num_index_heads} index heads evenly"
            )
        heads = target.num_index_heads, draft.num_kv_heads
        return ChosenBlocks(layer, *heads, target.top_k_blocks, target.block_size)

    def recorder(self) -> Recorder:
        """What the target's forward pass is to be given."""
        return Recorder(choice_of=self.layer)

    def recorded(self, recorder: Recorder, positions_T: Tensor) -> Tensor:
        """The choice of every row of that pass, int32 [T, J, N]."""
        blocks_TJN = recorder.blocks[self.layer]
        if blocks_TJN is not None:
            return blocks_TJN
        # Nothing was scored, since every block is chosen.
        block_N = torch.arange(self.top_k, dtype=torch.int32, device=positions_T.device)
        blocks_TN = torch.where(block_N <= positions_T[:, None] // self.block_size, block_N, -1)
        return blocks_TN[:, None].expand(-1, self.index_heads, -1)

    def nothing(self, device: torch.device) -> Tensor:
        """One row that chose no block."""
        return torch.full((1, self.index_heads, self.top_k), -1, dtype=torch.int32, device=device)

    def lists(self, choice_TJN: Tensor, positions_T: Tensor) -> Tensor:
        """Blocks that the draft's rows at these positions attend to, int32 [T, K, N + 1], from the choices one position
        before: ascending, -1 behind.
        """
        own_T11 = (positions_T // self.block_size).to(choice_TJN.dtype)[:, None, None]
        # No chosen block lies behind the row's own, so that one's place is at the end.
        known = (choice_TJN == own_T11).any(-1, keepdim=True)
        end = (choice_TJN >= 0).sum(-1, keepdim=True)
        lists = torch.nn.functional.pad(choice_TJN, (0, 1), value=-1)
        lists = lists.scatter(-1, end, torch.where(known, -1, own_T11))
        return lists.repeat_interleave(self.kv_heads // self.index_heads, dim=1)


def run_target(
    target: TargetModel, batch: Batch, cache: PagedCache, taps: Sequence[int], chosen: ChosenBlocks | None
) -> tuple[TargetOutput, Tensor | None]:
    """One pass, and the blocks that its rows chose, int32 [T, J, N], where a draft goes by them."""
    if chosen is None:
        return target(batch, cache, taps), None
    recorder = chosen.recorder()
    output = target(batch, cache, taps, recorder)
    return output, chosen.recorded(recorder, batch.positions)
