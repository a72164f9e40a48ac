"""One pass over a tree of guessed tokens equals decoding each of its paths; after a commit nothing tells them apart."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from target_model.batch import Batch
from target_model.cache import PagedCache
from target_model.model import Recorder, TargetModel
from tests.fixtures import random_target

TAPS = (1, 3, 5)
TOLERANCE = 1e-4
PAGES = 16


@dataclass(frozen=True)
class Tree:
    """Node 0 is the root, the last decided token; parent[i] < i."""

    parents: list[int]
    tokens: list[int]

    @property
    def depths(self) -> list[int]:
        return [len(self.path(node)) - 1 for node in range(len(self.parents))]

    @property
    def ancestors(self) -> list[int]:
        return [sum(1 << step for step in self.path(node)) for node in range(len(self.parents))]

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`."""
        return ([] if node == 0 else self.path(self.parents[node])) + [node]


def grow(rng: random.Random, nodes: int, vocabulary: int) -> Tree:
    """A random tree; parents near the end make it deep, so that it crosses block edges."""
    parents = [-1] + [rng.randrange(max(0, node - 4), node) for node in range(1, nodes)]
    return Tree(parents, [rng.randrange(vocabulary) for _ in range(nodes)])


def tables(sequences: int) -> list[list[int]]:
    return [list(range(r, sequences * PAGES, sequences)) for r in range(sequences)]


def prefill(model: TargetModel, sequences: list[list[int]]) -> PagedCache:
    """A cache with every sequence in it, its other slots holding finite garbage."""
    cache = PagedCache(model.config, len(sequences) * PAGES, dtype=torch.float32, device="cpu")
    for pool in (cache.k, cache.v, cache.index_k):
        pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(1)) * 3)
    for ids, table in zip(sequences, tables(len(sequences)), strict=True):
        if ids:
            model(Batch.causal(model.config.block_size, "cpu", [ids], [0], [table]), cache)
    return cache


def run_trees(
    model: TargetModel, cache: PagedCache, prefixes: list[list[int]], trees: list[Tree]
) -> tuple[Batch, Tensor, Tensor, Recorder]:
    batch = Batch.tree(
        model.config.block_size,
        "cpu",
        [tree.tokens for tree in trees],
        [len(prefix) for prefix in prefixes],
        tables(len(trees)),
        [tree.depths for tree in trees],
        [tree.ancestors for tree in trees],
    )
    recorder = Recorder()
    output = model(batch, cache, TAPS, recorder)
    return batch, output.final_state, output.aux, recorder


def decode_path(model: TargetModel, prefix: list[int], tokens: list[int]) -> tuple[Tensor, Tensor, Recorder]:
    """Final state, taps and insides of the last of `tokens`, decoded one by one behind the prefix."""
    cache = prefill(model, [prefix])
    for offset, token in enumerate(tokens):
        recorder = Recorder()
        batch = Batch.causal(model.config.block_size, "cpu", [[token]], [len(prefix) + offset], tables(1))
        output = model(batch, cache, TAPS, recorder)
    return output.final_state[0], output.aux[0], recorder


def assert_close(mine: Tensor, expected: Tensor) -> None:
    """Relative to the largest value: some logits reach 40, where one rounding in fp32 is 4e-6."""
    assert (mine - expected).abs().max() < TOLERANCE * max(1.0, expected.abs().max().item())


def assert_nodes_equal_paths(model, cache, prefixes, trees) -> int:
    """Returns how many rows a block was left out for."""
    _, final, aux, recorder = run_trees(model, cache, prefixes, trees)
    row = sparse_rows = 0
    for prefix, tree in zip(prefixes, trees, strict=True):
        for node in range(len(tree.parents)):
            path = [tree.tokens[step] for step in tree.path(node)]
            expected_final, expected_aux, expected = decode_path(model, prefix, path)
            assert_close(aux[row], expected_aux)
            for mine, other in zip(recorder.hidden_states, expected.hidden_states, strict=True):
                assert_close(mine[row], other[0])
            for layer, chosen in expected.blocks.items():
                assert torch.equal(recorder.blocks[layer][row], chosen[0])
            assert_close(model.logits(final[row]), model.logits(expected_final))
            last = len(prefix) + len(path) - 1
            sparse_rows += last // model.config.block_size + 1 > model.config.top_k_blocks
            row += 1
    return sparse_rows


@pytest.mark.parametrize("prefix_length", [0, 6, 15, 16, 17, 30, 31, 63])
def test_nodes_equal_sequential_decoding(prefix_length: int):
    """Prefixes around block edges (block 8), so that trees cross one or two of them."""
    model = random_target(seed=3)
    rng = random.Random(prefix_length)
    prefix = [rng.randrange(300) for _ in range(prefix_length)]
    tree = grow(rng, 14, 300)
    sparse_rows = assert_nodes_equal_paths(model, prefill(model, [prefix]), [prefix], [tree])
    assert prefix_length < 16 or sparse_rows >= 12


@pytest.mark.parametrize(
    "overrides",
    [
        {"top_k_blocks": 1},
        {"top_k_blocks": 4, "init_blocks": 1, "local_blocks": 2},
        {"num_kv_heads": 1, "block_size": 4, "top_k_blocks": 3},
        {"use_index_cache": True, "index_topk_freq": 2},
    ],
)
def test_other_choices(overrides: dict):
    """Other top-k, forced blocks, head counts, and layers that reuse the choice of the one before."""
    model = random_target(seed=4, **overrides)
    rng = random.Random(7)
    prefix = [rng.randrange(300) for _ in range(37)]
    tree = grow(rng, 12, 300)
    assert assert_nodes_equal_paths(model, prefill(model, [prefix]), [prefix], [tree]) == 12


def test_several_sequences_at_once():
    """Trees of different sizes behind prefixes of different lengths in one batch."""
    model = random_target(seed=5)
    rng = random.Random(11)
    prefixes = [[rng.randrange(300) for _ in range(length)] for length in (23, 0, 56)]
    trees = [grow(rng, nodes, 300) for nodes in (9, 3, 6)]
    assert_nodes_equal_paths(model, prefill(model, prefixes), prefixes, trees)


def test_a_full_tree_uses_all_64_bits():
    model = random_target(seed=6)
    rng = random.Random(13)
    prefix = [rng.randrange(300) for _ in range(21)]
    chain = Tree(list(range(-1, 63)), [rng.randrange(300) for _ in range(64)])
    _, final, _, _ = run_trees(model, prefill(model, [prefix]), [prefix], [chain])
    cache = prefill(model, [[]])
    whole = model(Batch.causal(8, "cpu", [prefix + chain.tokens], [0], tables(1)), cache).final_state
    assert (model.logits(final) - model.logits(whole[21:])).abs().max() < TOLERANCE


@pytest.mark.parametrize("prefix_length", [0, 7, 8, 21, 30])
def test_after_commit_the_cache_equals_a_fresh_prefill(prefix_length: int):
    """All slots up to the last accepted token, of all layers; and what is decoded next."""
    model = random_target(seed=8)
    rng = random.Random(prefix_length)
    prefixes = [[rng.randrange(300) for _ in range(length)] for length in (prefix_length, 19)]
    trees = [grow(rng, 16, 300), grow(rng, 10, 300)]
    cache = prefill(model, prefixes)
    batch, *_ = run_trees(model, cache, prefixes, trees)
    ends = [max(range(len(tree.parents)), key=tree.depths.__getitem__) for tree in trees]
    paths = [tree.path(end)[1:] for tree, end in zip(trees, ends, strict=True)]
    assert any(path != list(range(1, len(path) + 1)) for path in paths)
    width = max(map(len, paths))
    cache.commit(batch, torch.tensor([path + [-1] * (width - len(path)) for path in paths]))

    accepted = [
        prefix + [tree.tokens[node] for node in [0, *path]]
        for prefix, tree, path in zip(prefixes, trees, paths, strict=True)
    ]
    fresh = prefill(model, accepted)
    for ids, table in zip(accepted, tables(2), strict=True):
        for pool, expected in ((cache.k, fresh.k), (cache.v, fresh.v), (cache.index_k, fresh.index_k)):
            mine, other = (p[:, table].flatten(1, 2)[:, : len(ids)] for p in (pool, expected))
            assert (mine - other).abs().max() < TOLERANCE
    next_batch = Batch.causal(8, "cpu", [[1], [2]], [len(ids) for ids in accepted], tables(2))
    assert (model(next_batch, cache).final_state - model(next_batch, fresh).final_state).abs().max() < TOLERANCE
