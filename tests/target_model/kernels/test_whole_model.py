"""A whole small target, and one process's part of it, through the kernels equals itself through the references."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from target_model import sharding
from target_model.batch import Batch
from target_model.cache import PagedCache
from target_model.checkpoint import fill_parameters
from target_model.kernels import ops
from target_model.model import TargetModel
from target_model.pipeline import PipelineStage
from target_model.sharding import Shard, ShardedTarget, shard_specs
from tests.fixtures import random_target, random_tensors, tiny_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def part_of_a_target(build: Callable[..., ShardedTarget], shard: Shard, **overrides) -> ShardedTarget:
    """What a process of several holds, with random weights."""
    config = tiny_config(**overrides)
    target = build(config, shard)
    target.materialise("cpu")
    tensors = {spec.name: tensor for spec, tensor in random_tensors(config)}
    parts = ((own, tensors[spec.name], region) for spec, own, region in shard_specs(config, shard))
    fill_parameters(
        target, ((own, value[tuple(slice(*part) for part in region or ())]) for own, value, region in parts)
    )
    return target


def half_a_target(**overrides) -> ShardedTarget:
    """The second of two parts, whose sums stay partial: one KV head, and half of the experts."""
    return part_of_a_target(ShardedTarget, Shard(1, 2), **overrides | {"num_layers": 3})


def last_stage(**overrides) -> ShardedTarget:
    """The last layer, which gets the residual stream beside the taps of those before it."""
    return part_of_a_target(partial(PipelineStage, previous=0, following=None), Shard(0, 1, 3), **overrides)


def arrive(tensor: torch.Tensor, source: int) -> None:
    """What another process would have sent: the same for every implementation."""
    tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(tensor))))


def run(choice: str, make: Callable[..., TargetModel], monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Final states of a prefill, of a tree that crosses a block border, and of a decode step behind its commit."""
    monkeypatch.setattr(ops, "override", choice)
    monkeypatch.setattr(sharding.dist, "all_reduce", lambda *operands, **options: None)
    monkeypatch.setattr(sharding.dist, "recv", arrive)
    target = make(head_dim=32, rotary_dim=16, block_size=16, num_layers=4).to(DEVICE)
    page = target.config.block_size
    cache = PagedCache(target.config, 24, dtype=torch.float32, device=DEVICE)
    taps = (1, 2)
    prompts = [[(7 * i) % 50 for i in range(2 * page + 13)], [(3 * i) % 50 for i in range(page - 2)]]
    tables = [[11, 3, 17, 5, 2, 9, 20, 14, 7, 1, 6], [4, 8, 13]]
    starts = [len(prompt) for prompt in prompts]
    states = [target(Batch.causal(page, DEVICE, prompts, [0, 0], tables), cache, taps).final_state]
    depths, ancestors = [[0, 1, 1, 2, 3], [0, 1, 2, 2, 3]], [[1, 3, 5, 11, 27], [1, 3, 7, 11, 23]]
    tokens = [[5, 6, 7, 8, 9]] * 2
    batch = Batch.tree(page, DEVICE, tokens, starts, tables, depths, ancestors)
    states.append(target(batch, cache, taps).final_state)
    cache.commit(batch, torch.tensor([[1, 3, 4], [1, 2, 4]], device=DEVICE))
    step = Batch.causal(page, DEVICE, [[10]] * 2, [start + 4 for start in starts], tables)
    return [*states, target(step, cache, taps).final_state]


@pytest.mark.parametrize("make", [random_target, pytest.param(half_a_target, marks=pytest.mark.slow), last_stage])
def test_kernels_and_references_give_the_same_states(make, monkeypatch):
    for out, want in zip(run("triton", make, monkeypatch), run("reference", make, monkeypatch), strict=True):
        torch.testing.assert_close(out, want, atol=2e-4, rtol=2e-4)
