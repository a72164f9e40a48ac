"""fp8 K and V, and fp8 index K, chosen separately: speculation changes nothing within one choice, and rounding is what
everybody reads.
"""

from pathlib import Path

import pytest
import torch

from draft_model.resolve import resolve_draft
from serve.engine import Engine
from serve.request import SamplingParams
from serve.tree import TreeConfig
from target_model.batch import Batch
from target_model.cache import DraftKVShape, PagedCache
from target_model.checkpoint import load_target
from target_model.quantise_checkpoint import quantise_checkpoint
from target_model.resolve import resolve_target
from tests.fixtures import random_target, tiny_config, write_checkpoint
from tests.serve.drafts import mean_length, prompts, scripted_engine

FP8 = torch.float8_e4m3fn
LENGTHS = [1, 7, 9, 60]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=11, max_tokens=40, ignore_eos=True)
KINDS = [{"kv_dtype": FP8}, {"index_dtype": FP8}, {"kv_dtype": FP8, "index_dtype": FP8}]
by_kind = pytest.mark.parametrize("types", KINDS, ids=["kv", "index", "both"])


@pytest.fixture(scope="module")
def target():
    return random_target(seed=0)


@by_kind
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_speculation_on_equals_off(target, types, params):
    plain = {tuple(p): Engine(target, **types).generate([p], params)[0].token_ids for p in prompts(LENGTHS)}
    engine = scripted_engine(target, plain, TreeConfig(4, 4, 16), agreement=0.7, **types)
    completions = engine.generate(prompts(LENGTHS), params)
    assert [c.token_ids for c in completions] == [plain[tuple(p)] for p in prompts(LENGTHS)]
    assert mean_length(completions) > 1.4


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_quantised_weights_and_both_caches(tmp_path: Path, name):
    """The same promise for a quantised target."""
    write_checkpoint(tiny_config(), tmp_path / "plain")
    quantise_checkpoint(str(tmp_path / "plain"), tmp_path / name, name)
    target = load_target(tmp_path / name)
    plain = {tuple(p): Engine(target, **KINDS[2]).generate([p], SAMPLED)[0].token_ids for p in prompts([7, 9])}
    engine = scripted_engine(target, plain, TreeConfig(4, 4, 16), agreement=0.7, **KINDS[2])
    completions = engine.generate(prompts([7, 9]), SAMPLED)
    assert [c.token_ids for c in completions] == [plain[tuple(p)] for p in prompts([7, 9])]


def test_a_quantised_copy_finds_the_draft_of_its_origin(tmp_path: Path):
    quantise_checkpoint("m3-tiny", tmp_path / "copy", "mxfp8")
    resolved = resolve_target(str(tmp_path / "copy"))
    assert (resolved.name, resolved.origin) == ("copy", "m3-tiny")
    assert resolve_draft("eagle3", resolved).path == resolve_draft("eagle3", resolve_target("m3-tiny")).path


def test_the_type_matters(target):
    """Otherwise the tests above would pass without any rounding."""
    full = Engine(target).generate(prompts(LENGTHS), GREEDY)
    for types in KINDS:
        rounded = Engine(target, **types).generate(prompts(LENGTHS), GREEDY)
        assert [c.token_ids for c in rounded] != [c.token_ids for c in full], types


def test_pools_and_bytes():
    config = tiny_config()
    draft = DraftKVShape(4, 16)
    cache = PagedCache(config, 4, dtype=torch.bfloat16, device="cpu", draft=draft, kv_dtype=FP8)
    assert (cache.k.dtype, cache.v.dtype, cache.index_k.dtype) == (FP8, FP8, torch.bfloat16)
    assert cache.draft_k.dtype == cache.draft_v.dtype == torch.bfloat16
    main, index, drafted = 6 * 2 * 2 * 16, 4 * 16, 2 * 4 * 16
    assert cache.bytes_per_token() == main + 2 * index + 2 * drafted
    cache = PagedCache(config, 4, dtype=torch.bfloat16, device="cpu", draft=draft, index_dtype=FP8)
    assert cache.bytes_per_token() == 2 * main + index + 2 * drafted


@by_kind
def test_a_step_reads_what_it_rounded(target, types):
    """The rows of a prefill are stored as e4m3 numbers, and a second run over the same stored rows gives the same."""
    config = target.config
    cache = PagedCache(config, 8, dtype=torch.float32, device="cpu", **types)
    tokens = prompts([40])[0]
    whole = target(Batch.causal(config.block_size, "cpu", [tokens], [0], [list(range(8))]), cache).final_state[-1]
    last = target(Batch.causal(config.block_size, "cpu", [tokens[-1:]], [39], [list(range(8))]), cache).final_state[0]
    assert torch.allclose(whole, last, atol=1e-4)
    exact = PagedCache(config, 8, dtype=torch.float32, device="cpu")
    unrounded = target(Batch.causal(config.block_size, "cpu", [tokens], [0], [list(range(8))]), exact).final_state[-1]
    assert (whole - unrounded).abs().max() > 1e-3


def test_large_numbers_become_the_largest(target):
    from target_model.kernels.write_kv_ref import write_kv

    config = target.config
    cache = PagedCache(config, 1, dtype=torch.float32, device="cpu", kv_dtype=FP8)
    batch = Batch.causal(config.block_size, "cpu", [[1, 2]], [0], [[0]])
    rows = torch.full((2, config.num_kv_heads, config.head_dim), 1e4)
    write_kv(rows, -rows, cache.k[0], cache.v[0], batch)
    assert cache.k[0, 0, :2].float().unique().tolist() == [448] and cache.v[0, 0, :2].float().unique().tolist() == [
        -448
    ]
