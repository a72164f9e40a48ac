"""Features from a target whose layers are spread over processes: forward only, in stages, with micro batches in flight.

The processes form teams of `stages` ranks. Rank i of a team holds stage i of the target and, as everywhere in training,
one copy of the draft. In an optimizer step a team runs the micro batches of all its ranks through its stages, one
behind the other: while a stage works on one, the stage before it works on the next. The last stage has taps and final
states, and deals them out to the ranks whose rows they are.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from target_model.errors import UserError
from target_model.pipeline import PipelineStage
from target_model.resolve import ResolvedTarget
from target_model.shard_loading import load_shard
from target_model.sharding import Shard
from train.data import TrainingRows
from train.features import DraftBlocks, Features, OnlineCapture


def load_stage(
    target: ResolvedTarget, stages: int, rank: int, world: int, *, dtype: torch.dtype, device: torch.device
) -> PipelineStage:
    """The stage of the target that this rank holds; stages have as many layers as each other, give or take one."""
    layers = target.config.num_layers
    if world % stages:
        raise UserError(f"features.stages={stages} does not divide the {world} processes of this run")
    if stages > layers:
        raise UserError(f"features.stages={stages}, but target {target.name} has {layers} layers")
    stage = rank % stages
    build = partial(
        PipelineStage,
        previous=rank - 1 if stage > 0 else None,
        following=rank + 1 if stage < stages - 1 else None,
    )
    shard = Shard(0, 1, stage * layers // stages, (stage + 1) * layers // stages)
    return load_shard(str(target.path), shard, dtype=dtype, device=device, build=build)


class PipelinedCapture(OnlineCapture):
    """`OnlineCapture` over a stage of the target. The ranks of a team call every method together."""

    def __init__(
        self,
        stage: PipelineStage,
        rows: TrainingRows,
        taps: Sequence[int],
        steps: int,
        *,
        stages: int,
        rank: int,
        world: int,
        capture_rows: int,
    ):
        super().__init__(stage, rows, taps, steps, capture_rows=capture_rows)
        self._widths = (stage.config.hidden_size, stage.config.hidden_size * len(self.taps))
        self._rank, self._team = rank, range(rank // stages * stages, (rank // stages + 1) * stages)
        # All ranks make all groups, in the same order.
        groups = [dist.new_group(list(range(first, first + stages))) for first in range(0, world, stages)]
        self._group = groups[rank // stages]

    def features(self, indices: np.ndarray) -> Features:
        """The same rows for every rank of the team."""
        partial_features, states = self._through_stages(indices)
        return self._with_states(partial_features, self._shared(states, partial_features.token_ids))

    def text(self, token_ids_1S: Tensor) -> tuple[Tensor, Tensor, DraftBlocks | None]:
        final, aux, _ = super().text(token_ids_1S)
        states = torch.cat([final, aux], dim=-1) if self._rank == self._team[-1] else None
        final, aux = self._shared(states, token_ids_1S).split(self._widths, dim=-1)
        return final, aux, None

    def _shared(self, states: Tensor | None, token_ids_RS: Tensor) -> Tensor:
        """The last stage's states on every rank of the team."""
        states = self._empty(token_ids_RS) if states is None else states.contiguous()
        dist.broadcast(states, self._team[-1], group=self._group)
        return states

    def micro_batches(self, parts: list[list[np.ndarray]], rank: int) -> list[Features]:
        """The micro batches of `rank`, this one, of the rows `parts` [ranks][micro batches] of an optimizer step."""
        queue = [(owner, rows) for micro in range(len(parts[rank])) for owner, rows in self._column(parts, micro)]
        results = [(owner, *self._through_stages(rows)) for owner, rows in queue]
        # Behind the last micro batch: on its way a result would wait for the rows that its owner still has to send.
        mine = []
        for owner, partial_features, states in results:
            if owner == rank and states is None:
                states = self._empty(partial_features.token_ids)
                dist.recv(states, self._team[-1])
            elif owner != rank and states is not None:
                dist.send(states, owner)
            if owner == rank:
                mine.append(self._with_states(partial_features, states))
        return mine

    def _column(self, parts: list[list[np.ndarray]], micro: int) -> list[tuple[int, np.ndarray]]:
        return [(owner, parts[owner][micro]) for owner in self._team]

    def _through_stages(self, indices: np.ndarray) -> tuple[Features, Tensor | None]:
        """The rows without states, and on the last stage final state and taps side by side, [R, S, H + A]."""
        captured = super().features(indices)
        states = None
        if self._rank == self._team[-1]:
            states = torch.cat([captured.final_state, captured.aux], dim=-1).contiguous()
        return replace(captured, aux=torch.empty(0), final_state=torch.empty(0)), states

    def _empty(self, token_ids_RS: Tensor) -> Tensor:
        shape = (*token_ids_RS.shape, sum(self._widths))
        return torch.empty(shape, dtype=self.target.dtype, device=self.device)

    def _with_states(self, features: Features, states: Tensor) -> Features:
        final, aux = states.split(self._widths, dim=-1)
        return replace(features, aux=aux, final_state=final)
