"""Random trees behind random prefixes: every node's hidden states, blocks and logits are those of decoding its path."""

import functools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from target_model.model import TargetModel
from tests.fixtures import random_target
from tests.target_model.test_tree import Tree, assert_nodes_equal_paths, prefill

BLOCK = 8


@functools.cache
def model(top_k: int, init_blocks: int, local_blocks: int, kv_heads: int) -> TargetModel:
    return random_target(
        seed=9, top_k_blocks=top_k, init_blocks=init_blocks, local_blocks=local_blocks, num_kv_heads=kv_heads
    )


@st.composite
def cases(draw):
    """A target, prefixes whose ends lie within two slots of a block's edge (or anywhere), a tree behind each."""
    top_k = draw(st.integers(1, 5))
    local = draw(st.integers(1, min(2, top_k)))
    init = draw(st.integers(0, min(1, top_k - local)))
    edge = st.builds(lambda block, offset: max(0, block * BLOCK + offset), st.integers(0, 6), st.integers(-2, 2))
    lengths = draw(st.lists(edge | st.integers(0, 60), min_size=1, max_size=2))
    # The parent of node i is i - 1 - gap: small gaps make deep trees that cross an edge, large ones make wide trees.
    gaps = [draw(st.lists(st.integers(0, 4), max_size=7)) for _ in lengths]
    return model(top_k, init, local, draw(st.sampled_from([1, 2]))), lengths, gaps, draw(st.integers(0, 2**32))


def check(case) -> None:
    target, lengths, gaps, seed = case
    rng = random.Random(seed)
    prefixes = [[rng.randrange(300) for _ in range(length)] for length in lengths]
    trees = []
    for each in gaps:
        parents = [-1] + [max(0, node - gap) for node, gap in enumerate(each)]
        trees.append(Tree(parents, [rng.randrange(300) for _ in parents]))
    assert_nodes_equal_paths(target, prefill(target, prefixes), prefixes, trees)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_nodes_equal_their_paths(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_many_trees(case):
    check(case)
