"""Stages of a pipeline: consecutive layers of a target in one process, the next ones in another.

From stage to stage go the residual stream, the taps so far and, where the next sparse layer reuses it, the choice of
blocks. The norm that follows is computed by the receiver. Shapes: T rows, H hidden, A = taps * H, J index heads, N
chosen blocks.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from target_model.batch import Batch
from target_model.cache import PagedCache, TransientCache
from target_model.config import M3Config
from target_model.model import Recorder, TargetOutput
from target_model.quantised_formats import Format
from target_model.sharding import Shard, ShardedTarget


class PipelineStage(ShardedTarget):
    """The layers `shard.first` up to `shard.end`, or a part of each, between the processes of global rank `previous`
    and `following` (None at the ends).

    Every stage is called with the same batches and taps. The last one returns states and all taps, the others [T, 0];
    the embedding is held by the first stage only, the output head by the last. Its cache holds its own layers;
    recorders count layers from the first of the target.
    """

    def __init__(
        self,
        config: M3Config,
        shard: Shard,
        dtype: torch.dtype = torch.float32,
        *,
        previous: int | None,
        following: int | None,
        vision: bool = False,
        formats: Mapping[str, Format] | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        super().__init__(config, shard, dtype, vision=vision, formats=formats, group=group)
        self.previous, self.following = previous, following
        if previous is not None:
            del self.embed_tokens
        if following is not None:
            del self.lm_head

    @torch.no_grad()
    def forward(
        self,
        batch: Batch,
        cache: PagedCache | TransientCache,
        taps: Sequence[int] = (),
        recorder: Recorder | None = None,
    ) -> TargetOutput:
        """As TargetModel's, over the layers held here. Taps ascend."""
        layers = self.shard.layers(self.whole)
        if self.previous is None:
            residual_TH, earlier, blocks_TJN = self.embed(batch), [], None
        else:
            received = self._receive(batch, sum(tap < layers.start for tap in taps))
            residual_TH, *earlier = received.split(self.config.hidden_size, dim=-1)
            residual_TH = residual_TH.contiguous()  # as kernels read it
            blocks_TJN = self._receive_blocks(batch, recorder)
        own_taps = [tap for tap in taps if tap in layers]
        normed_TH, residual_TH, blocks_TJN, tapped = self.run_layers(
            residual_TH, blocks_TJN, batch, cache, own_taps, recorder
        )
        taken = [*earlier, *tapped]
        if self.following is None:
            return TargetOutput(normed_TH, torch.cat(taken, dim=-1) if taken else normed_TH[:, :0])
        dist.send(torch.cat([residual_TH, *taken], dim=-1), self.following)
        if self._choice_crosses(layers.stop, batch, recorder):
            dist.send(blocks_TJN.contiguous(), self.following)
        return TargetOutput(normed_TH[:, :0], normed_TH[:, :0])

    def _receive(self, batch: Batch, taps: int) -> Tensor:
        """[T, H + A]: the residual stream that enters the first layer, and the taps of earlier stages."""
        width = (1 + taps) * self.config.hidden_size
        received = torch.empty(batch.num_rows, width, dtype=self.dtype, device=self.device)
        dist.recv(received, self.previous)
        return received

    def _receive_blocks(self, batch: Batch, recorder: Recorder | None) -> Tensor | None:
        if not self._choice_crosses(self.shard.first, batch, recorder):
            return None
        shape = (batch.num_rows, self.config.num_index_heads, self.config.top_k_blocks)
        received = torch.empty(shape, dtype=torch.int32, device=self.device)
        dist.recv(received, self.previous)
        return received

    def _choice_crosses(self, cut: int, batch: Batch, recorder: Recorder | None) -> bool:
        """Whether a choice was made before layer `cut` that the next sparse layer uses."""
        config = self.whole
        following = next((n for n in range(cut, config.num_layers) if config.sparse_layers[n]), None)
        if following is None or not config.reuses_blocks[following]:
            return False
        complete = recorder is not None and recorder.complete
        return complete or batch.max_context > config.top_k_blocks * config.block_size
