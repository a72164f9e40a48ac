"""Options of the target that transformers does not have: reuse of block choices, taps, storage."""

import contextlib
import gc

import pytest
import torch

from target_model.batch import Batch
from target_model.cache import PagedCache
from target_model.errors import UserError
from target_model.kernels import ops
from target_model.model import Recorder, record_graph
from tests.fixtures import random_target


def run(seed: int = 0, **options) -> tuple[Recorder, PagedCache]:
    """A T0 over 100 tokens (13 blocks, top-k 2)."""
    model = random_target(seed, **options)
    ids = torch.randint(300, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    cache = PagedCache(model.config, 13, dtype=torch.float32, device="cpu")
    recorder = Recorder()
    model(Batch.causal(8, "cpu", [ids], [0], [list(range(13))]), cache, recorder=recorder)
    return recorder, cache


def test_reusing_layers_take_the_choice_before_them():
    """T0's sparse layers 2..5, of which 3 and 5 reuse. A reusing layer neither scores nor stores index keys."""
    plain, _ = run()
    reusing, cache = run(use_index_cache=True, index_topk_freq=2)
    for layer in (3, 5):
        assert torch.equal(reusing.blocks[layer], reusing.blocks[layer - 1])
        assert not torch.equal(plain.blocks[layer], plain.blocks[layer - 1])
        assert not cache.layer(layer).index_k.any() and cache.layer(layer - 1).index_k.any()
    assert torch.equal(plain.hidden_states[3], reusing.hidden_states[3])
    assert not torch.allclose(plain.hidden_states[4], reusing.hidden_states[4])


def test_recording_changes_nothing_while_every_block_is_chosen():
    """Below top-k blocks nothing is scored, unless a recorder asks which blocks they are."""
    model = random_target()
    batch = Batch.causal(8, "cpu", [list(range(16))], [0], [[0, 1]])
    caches = [PagedCache(model.config, 2, dtype=torch.float32, device="cpu") for _ in range(2)]
    recorder = Recorder()
    recorded = model(batch, caches[0], recorder=recorder).final_state
    assert torch.allclose(recorded, model(batch, caches[1]).final_state, atol=1e-5)
    assert recorder.blocks[2][3].tolist() == [[0, -1]] * 2 and recorder.blocks[2][15].tolist() == [[0, 1]] * 2
    assert torch.equal(caches[0].index_k, caches[1].index_k) and caches[0].index_k.any()


@pytest.mark.parametrize("taps", [(1, 1, 3), (3, 1), (0, 6), (-1, 2)])
def test_taps_must_name_layers(taps: tuple[int, ...]):
    model = random_target()
    model.config.check_taps((0, 3, 5))
    with pytest.raises(UserError, match="taps"):
        model.config.check_taps(taps)
    with pytest.raises(UserError, match="taps"):
        model.capture(torch.zeros(1, 4, dtype=torch.int64), taps)


def test_nothing_can_be_trained():
    model = random_target()
    assert not any(parameter.requires_grad for parameter in model.parameters())
    final, aux = model.capture(torch.arange(12).view(1, 12), (1, 3, 5))
    assert not final.requires_grad and not aux.requires_grad and not final.is_inference()


def test_the_kernels_can_be_chosen(monkeypatch):
    monkeypatch.setattr(ops, "override", "fastest")
    with pytest.raises(UserError, match="SPEC_KERNELS must be triton or reference, not 'fastest'"):
        run()


def test_nothing_is_freed_by_the_way_while_a_graph_is_captured(monkeypatch):
    """Not even after a capture that fails."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: contextlib.nullcontext())
    seen = []
    record_graph(lambda: seen.append(gc.isenabled()), None)
    with pytest.raises(ZeroDivisionError):
        record_graph(lambda: 1 // 0, None)
    assert seen == [False] and gc.isenabled()
