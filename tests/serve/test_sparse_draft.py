"""A draft that attends to the target's blocks: what its rows see, and that answers stay what they are."""

import pytest
import torch

from draft_model.chosen_blocks import ChosenBlocks
from draft_model.config import DraftConfig
from serve.engine import Engine
from serve.request import Request, SamplingParams
from serve.tree import TreeConfig
from target_model.errors import UserError
from tests.fixtures import random_target
from tests.serve.drafts import mean_length, plain, prompts, random_draft, scripted_engine

LENGTHS = [1, 7, 8, 9, 60, 100]
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=11, max_tokens=48, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
TREE = TreeConfig(3, 2, 6)


@pytest.fixture(scope="module")
def target():
    return random_target(seed=0)


@pytest.mark.parametrize("attention", ["sparse", "sparse:3"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_answers_stay(target, params, attention):
    answers = plain(target, params, prompts(LENGTHS))
    for engine in (
        Engine(target, random_draft(target), TREE, draft_attention=attention),
        scripted_engine(target, answers, TREE, agreement=0.6, draft_attention=attention),
        scripted_engine(target, answers, TREE, agreement=0.6, draft_attention=attention, pages=40),
    ):
        completions = engine.generate(prompts(LENGTHS), params)
        assert [c.token_ids for c in completions] == [answers[tuple(p)] for p in prompts(LENGTHS)]
    assert mean_length(completions) > 1.4


def test_lists_add_the_own_block_once():
    chosen = ChosenBlocks(layer=0, index_heads=2, kv_heads=4, top_k=3, block_size=8)
    choice_TJN = torch.tensor([[[0, 2, -1], [1, -1, -1]], [[0, 1, 2], [2, -1, -1]], [[0, 1, 2], [0, 2, -1]]]).int()
    lists = chosen.lists(choice_TJN, torch.tensor([24, 23, 16]))
    assert lists.shape == (3, 4, 4) and lists.dtype == torch.int32
    assert lists[0].tolist() == [[0, 2, 3, -1]] * 2 + [[1, 3, -1, -1]] * 2
    assert lists[1].tolist() == [[0, 1, 2, -1]] * 2 + [[2, -1, -1, -1]] * 2
    assert lists[2].tolist() == [[0, 1, 2, -1]] * 2 + [[0, 2, -1, -1]] * 2


def states(target, attention: str, length: int) -> tuple[torch.Tensor, Engine]:
    """The draft's state at the root behind a prompt."""
    engine = Engine(target, random_draft(target), TREE, draft_attention=attention)
    engine.add(Request("r", prompts([length])[0], SAMPLED))
    engine.step()
    ((_, _, sequence),) = engine.scheduler.running
    return sequence.root_state, engine


def test_short_contexts_are_seen_whole_and_long_ones_are_not(target):
    """While the target chooses every block, sparse is full; then it is what attention over the chosen blocks gives."""
    config = target.config
    whole = config.top_k_blocks * config.block_size
    for length, same in ((whole - 2, True), (whole + 40, False)):
        full, sparse = states(target, "full", length)[0], states(target, "sparse", length)[0]
        assert torch.allclose(full, sparse, atol=1e-5) == same


def test_a_row_sees_its_blocks_and_nothing_else(target):
    """Keys outside the root's list may be anything; one inside may not."""
    engine = states(target, "sparse", 100)[1]
    ((_, _, sequence),) = engine.scheduler.running
    drafter, cache = engine.runner.drafter, engine.runner.cache
    lists_KN, size = sequence.root_blocks, target.config.block_size
    pages = len(sequence.token_ids) // size
    unseen = [block for block in range(pages) if not (lists_KN == block).any()]
    seen = [block for block in range(pages) if (lists_KN == block).any()]
    assert unseen and seen

    def grown() -> torch.Tensor:
        return drafter.grow([sequence], [3], None, TREE).score_RM.clone()

    before = grown()
    for block, differs in ((unseen[0], False), (seen[0], True)):
        kept = cache.draft_v[sequence.pages[block]].clone()
        cache.draft_v[sequence.pages[block]] += 100
        assert torch.equal(grown(), before) != differs
        cache.draft_v[sequence.pages[block]] = kept
    assert torch.equal(grown(), before)


def test_a_cached_prefix_changes_nothing(target):
    """Guesses behind a prefix hit equal those of a cold run, though the choice of its last position is not kept."""
    prompt = prompts([97])[0]

    engine, pools = Engine(target, random_draft(target), TREE, draft_attention="sparse"), []
    for hit in (0, 96):
        engine.add(Request("r", prompt, SAMPLED))
        engine.step()
        ((_, _, sequence),) = engine.scheduler.running
        assert sequence.cached_tokens == hit
        pools.append(engine.runner.drafter.grow([sequence], [3], None, TREE))
        engine.abort("r")
    assert torch.equal(pools[0].token_RM, pools[1].token_RM)
    torch.testing.assert_close(pools[0].score_RM, pools[1].score_RM, atol=1e-4, rtol=0)


@pytest.mark.parametrize("text", ["dense", "sparse:", "full:3", "sparse:-1", "sparse:x", "sparse:0", "sparse:99"])
def test_what_cannot_be(target, text):
    with pytest.raises(UserError, match="draft attention"):
        Engine(target, random_draft(target), TREE, draft_attention=text)


def test_heads_have_to_divide(target):
    draft = random_draft(target)
    config = DraftConfig(**{**vars(draft.config), "num_kv_heads": 1, "num_heads": 1})
    with pytest.raises(UserError, match="kv heads"):
        ChosenBlocks.parse("sparse", target.config, config)
