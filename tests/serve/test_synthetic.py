"""Forced acceptance has the mean and the schedule that were asked for, and says that it is forced."""

import pytest

from serve.engine import Engine
from serve.load import EngineOptions, load_engine
from serve.request import SamplingParams
from serve.synthetic import SyntheticAcceptance
from serve.tree import Tree, TreeConfig
from target_model.errors import UserError
from tests.fixtures import random_target
from tests.serve.drafts import mean_length, prompts, random_draft


@pytest.mark.parametrize("length", [1, 1.4, 2.83, 3.9, 4])
def test_mean_and_schedule(length):
    shape = TreeConfig.chain(3)
    synthetic = SyntheticAcceptance(length, shape)
    chain = Tree([0, 1, 2, 3], [-1, 0, 1, 2])
    kept = [len(synthetic.path(chain)) for _ in range(2000)]
    assert sum(kept) / 2000 + 1 == pytest.approx(length, abs=0.01)
    for depth, share in enumerate(synthetic.per_position, 1):
        assert sum(k >= depth for k in kept) / 2000 == pytest.approx(share, abs=0.01)
    first = synthetic.per_position[0]
    assert synthetic.per_position == pytest.approx([first, first**2, first**3])


def test_follows_the_longest_path_of_a_tree():
    synthetic = SyntheticAcceptance(4, TreeConfig(3, 2, 6))
    assert synthetic.path(Tree([0, 1, 2, 3, 4, 5], [-1, 0, 0, 2, 3, 1])) == [2, 3, 4]


@pytest.mark.parametrize("tree", [TreeConfig.chain(3), TreeConfig(4, 3, 12)], ids=str)
def test_in_the_engine(tree):
    """A draft that is never right still gives the length that was asked for, and the cache stays in order."""
    target = random_target(seed=0)
    engine = Engine(target, random_draft(target), tree, synthetic_acceptance=2.83)
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    completions = engine.generate(prompts([5, 9, 30]), params)
    assert [len(c.token_ids) for c in completions] == [120] * 3
    assert mean_length(completions) == pytest.approx(2.83, abs=0.1)
    stats = engine.stats()
    assert stats["synthetic_acceptance_length"] == 2.83
    assert sum(kept * steps for kept, steps in enumerate(stats["accepted_histogram"])) == stats["accepted_tokens"]
    assert Engine(target, random_draft(target), tree).stats()["synthetic_acceptance_length"] is None


@pytest.mark.parametrize("length", [0.9, 4.1, float("nan")])
def test_lengths_that_cannot_be(length):
    with pytest.raises(UserError, match="from 1 to 4"):
        SyntheticAcceptance(length, TreeConfig.chain(3))


def test_the_server_says_so():
    *_, description = load_engine(EngineOptions("m3-tiny", "eagle3", pages=64, device="cpu", synthetic_acceptance=2.0))
    assert any("SYNTHETIC" in line and "meaningless" in line for line in description.lines)
    *_, description = load_engine(EngineOptions("m3-tiny", "eagle3", pages=64, device="cpu"))
    assert not any("SYNTHETIC" in line for line in description.lines)


def test_an_engine_that_starts_over_owes_nothing():
    """Nor has it found cached prompts or preempted anybody."""
    target = random_target(seed=0)
    made = [Engine(target, random_draft(target), TreeConfig.chain(4), synthetic_acceptance=2.0) for _ in range(2)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for prompt in ([1] * 40, [1] * 41, [2] * 7):
        made[0].generate([prompt], params)
    assert made[0].stats()["cached_prompt_tokens"] > 0
    made[0].start_over()
    for engine in made:
        engine.generate([[1] * 40], params)
    counts = [{k: v for k, v in engine.stats().items() if not k.endswith("seconds")} for engine in made]
    assert counts[0] == counts[1]
