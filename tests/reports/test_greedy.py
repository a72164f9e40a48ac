"""GREEDY: speculation changes the greedy answer, or leaves the draft in another state than a fresh one would have.

Reports R1 (tree compaction, strides), R5 (batch bookkeeping) and R23 (the draft's state after a round); the answer of
every case must equal plain decoding token for token. Also tried, of the same kind: every draft on every tree with 1, 2,
5 and 12 prompts (all pairs under `slow`), a draft whose first guess is always wrong and whose second is right, prompts
of 1 token and around the edges of a block of 8, chains as well as trees, too few pages, subtrees of random trees.
"""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.request import Request, SamplingParams
from serve.tree import Tree, TreeConfig
from target_model.batch import Batch
from target_model.cache import PagedCache
from tests.fixtures import random_target
from tests.serve.drafts import drive, mean_length, plain, prompts, scripted_engine

TREES = [TreeConfig(3, 1, 4), TreeConfig(3, 2, 6), TreeConfig(4, 4, 16), TreeConfig(5, 3, 32)]
# Agreement, place of the right guess among its siblings, and the acceptance length that must come out.
DRAFTS = {
    "nearly always": (0.97, 0, (3, 6.1)),
    "half": (0.55, 0, (1.5, 2.5)),
    "never": (0.0, 0, (1, 1)),
    "second": (1.0, 1, (2.5, 6.1)),
}
LENGTHS = [1, 7, 8, 9, 60, 15, 16, 17, 2, 31, 33, 64]
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def target():
    return random_target(seed=0)


class Answers(dict):
    """Plain answers by prompt, worked out when they are first asked for."""

    def __init__(self, target):
        super().__init__()
        self.target = target

    def __missing__(self, prompt: tuple[int, ...]) -> list[int]:
        self |= plain(self.target, GREEDY, [list(prompt)])
        return self[prompt]


@pytest.fixture(scope="module")
def answers(target):
    return Answers(target)


def check_r1(target, answers, tree: TreeConfig, draft: str, batch: int) -> None:
    agreement, rank, bounds = DRAFTS[draft]
    engine = scripted_engine(target, answers, tree, agreement=agreement, rank=rank)
    requests = [Request(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts(LENGTHS)[:batch])]
    got = drive(engine, requests)
    assert [got[r.id].token_ids for r in requests] == [answers[tuple(r.prompt_ids)] for r in requests]
    if batch >= 5:
        low, high = bounds if rank == 0 or tree.width > 1 else (1, 1)
        assert low <= mean_length(got.values()) <= high


@pytest.mark.parametrize(
    ("tree", "draft", "batch"),
    [
        (TREES[0], "half", 5),
        (TREES[0], "second", 1),
        (TREES[0], "nearly always", 2),
        (TREES[1], "second", 5),
        (TREES[1], "half", 1),
        (TREES[2], "nearly always", 5),
        (TREES[2], "second", 2),
        (TREES[2], "never", 1),
        (TREES[3], "second", 5),
        (TREES[3], "half", 2),
    ],
    ids=str,
)
def test_r1_trees_equal_plain_decoding(target, answers, tree, draft, batch):
    check_r1(target, answers, tree, draft, batch)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 5, 12])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_r1_all_trees_drafts_and_batches(target, answers, tree, draft, batch):
    check_r1(target, answers, tree, draft, batch)


@st.composite
def trees_with_choices(draw):
    """A tree of few tokens, so that paths often match, and the target's choice behind every node."""
    size = draw(st.integers(1, 24))
    parents = [-1] + [draw(st.integers(max(0, node - 5), node - 1)) for node in range(1, size)]
    used: dict[int, set[int]] = {}
    tokens = [0]
    for parent in parents[1:]:
        free = sorted(set(range(8)) - used.setdefault(parent, set()))
        tokens.append(draw(st.sampled_from(free)))
        used[parent].add(tokens[-1])
    return Tree(tokens, parents), draw(st.lists(st.integers(0, 7), min_size=size, max_size=size)), draw(st.randoms())


@settings(max_examples=200, deadline=None)
@given(trees_with_choices())
def test_r1_a_wider_tree_never_accepts_less(case):
    """Of a tree and any part of it that keeps parents, from the same state."""
    tree, choices, chance = case
    kept = [0]
    for node in range(1, len(tree)):
        if tree.parents[node] in kept and chance.random() < 0.7:
            kept.append(node)
    place = {node: index for index, node in enumerate(kept)}
    part = Tree([tree.tokens[n] for n in kept], [place.get(tree.parents[n], -1) for n in kept])
    whole = tree.accept(choices)
    some = [kept[node] for node in part.accept([choices[node] for node in kept])]
    assert some == whole[: len(some)]
    # Each accepted node hangs below the one before and carries the choice made there.
    for parent, node in zip([0, *whole], whole, strict=False):
        assert tree.parents[node] == parent and tree.tokens[node] == choices[parent]


def test_r5_a_crowd_that_comes_and_goes(target):
    """Twelve requests arrive at any time, three are aborted: text and accepted lengths are those of a solo run."""
    chance = random.Random(5)
    batch = prompts([chance.randrange(1, 91) for _ in range(12)], seed=8)
    params = [
        SamplingParams(temperature=0.0 if i % 3 else 1.0, seed=i, max_tokens=chance.randrange(1, 81), ignore_eos=True)
        for i in range(12)
    ]
    requests = [Request(str(i), p, s) for i, (p, s) in enumerate(zip(batch, params, strict=True))]
    scripts = {}
    for request in requests:
        scripts |= plain(target, request.params, [request.prompt_ids])
    tree = TreeConfig(4, 2, 8)
    solo = {r.id: drive(scripted_engine(target, scripts, tree, agreement=0.6), [r])[r.id] for r in requests}
    arrivals = {request.id: chance.randrange(20) for request in requests}
    aborts = {"2": 9, "5": 15, "9": 22}
    for pages in (None, 40):
        engine = scripted_engine(target, scripts, tree, agreement=0.6, prefill_tokens=13, pages=pages)
        got = drive(engine, requests, arrivals, aborts)
        assert (engine.stats()["preemptions"] > 0) == (pages is not None)
        for request in requests:
            if request.id not in aborts:
                alone, crowded = solo[request.id], got[request.id]
                assert crowded.token_ids == alone.token_ids == scripts[tuple(request.prompt_ids)]
                # A request that was preempted begins again with a verify step of its own; others step alike.
                if pages is None:
                    assert crowded.steps == alone.steps
        assert engine.stats()["pages_free"] + engine.stats()["pages_cached"] == engine.stats()["pages_total"]


@pytest.mark.parametrize("tree", [TreeConfig.chain(3), TreeConfig(4, 4, 16)], ids=str)
def test_r23_after_every_round_both_caches_are_those_of_a_fresh_start(target, tree):
    """Ten rounds of three sequences. All rows of decided tokens equal a prefill of the same text; so do the state that
    the next tree grows from, and the logits it gives: the draft has redone its guesses with the target's features.
    """
    rank = 2 if tree.width > 2 else 0
    batch = prompts([9, 60, 8], seed=11)
    engine = scripted_engine(target, plain(target, GREEDY, batch), tree, agreement=0.8, rank=rank)
    for i, prompt in enumerate(batch):
        engine.add(Request(str(i), prompt, GREEDY))
    for _ in range(11):
        engine.step()
        with torch.inference_mode():
            engine.runner.drafter.follow([sequence for _, _, sequence in engine.scheduler.running])
        for _, _, sequence in engine.scheduler.running:
            assert_state_is_fresh(engine, sequence)
    assert engine.stats()["accepted_tokens"] > 20


def assert_state_is_fresh(engine, sequence) -> None:
    target, draft, cache = engine.runner.target, engine.runner.drafter.draft, engine.runner.cache
    count = len(sequence.token_ids) - 1
    assert (sequence.computed, sequence.draft_end) == (count, count + 1)
    pages = list(range(-(-(count + 1) // cache.page_size)))
    fresh = PagedCache(target.config, len(pages), dtype=torch.float32, device="cpu", draft=draft.kv_shape)
    with torch.inference_mode():
        output = target(Batch.causal(8, "cpu", [sequence.token_ids[:-1]], [0], [pages]), fresh, draft.config.taps)
        rows = Batch.causal(8, "cpu", [sequence.token_ids[1:]], [1], [pages])
        state = draft(rows, draft.project(output.aux), fresh.draft())[-1]
    for live, cold in ((cache.k, fresh.k), (cache.v, fresh.v), (cache.index_k, fresh.index_k)):
        mine, other = live[:, sequence.pages].flatten(1, 2)[:, :count], cold.flatten(1, 2)[:, :count]
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)
    for live, cold in ((cache.draft_k, fresh.draft_k), (cache.draft_v, fresh.draft_v)):
        mine, other = live[sequence.pages].flatten(0, 1)[1 : count + 1], cold.flatten(0, 1)[1 : count + 1]
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)
    torch.testing.assert_close(draft.logits(sequence.root_state), draft.logits(state), atol=1e-4, rtol=0)
