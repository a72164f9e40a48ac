"""What the processes of a run tell each other. All of them call these together."""

from typing import Any

import torch

from train.loss import StepSums


def from_rank_zero(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    box = [value]
    torch.distributed.broadcast_object_list(box)
    return box[0]


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether it is so on any of them."""
    if torch.distributed.get_world_size() == 1:
        return flag
    found = torch.tensor(float(flag), device=device)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return bool(found)


def reduce_sums(sums: StepSums) -> StepSums:
    """The sums of all of them."""
    if torch.distributed.get_world_size() == 1:
        return sums
    stacked = torch.stack(sums.tensors())
    torch.distributed.all_reduce(stacked)
    return StepSums(*stacked)
