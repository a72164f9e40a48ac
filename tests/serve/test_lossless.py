"""Speculation never changes an answer: greedy and seeded sampling, trees and chains, alone and crowded, through
preemption.

The drafts follow a script of the plain continuation, so that acceptance is high, middling or only on a side branch as
the test needs it.
"""

import pytest

from serve.engine import Engine
from serve.request import SamplingParams
from serve.tree import TreeConfig
from tests.fixtures import random_target
from tests.serve.drafts import mean_length, plain, prompts, random_draft, scripted_engine

STATIC = TreeConfig.static([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (2, 0, 1)])
TREES = [TreeConfig(3, 1, 4), TreeConfig(3, 2, 6), TreeConfig(4, 4, 16), TreeConfig(5, 3, 32), STATIC]
LENGTHS = [1, 7, 8, 9, 60]  # around the edges of a block of 8
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=11, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def target():
    return random_target(seed=0)


@pytest.fixture(scope="module")
def greedy_answers(target):
    return plain(target, GREEDY, prompts(LENGTHS))


@pytest.fixture(scope="module")
def sampled_answers(target):
    return plain(target, SAMPLED, prompts(LENGTHS))


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_same_seed_same_text(target, sampled_answers, tree):
    for agreement in (1.0, 0.55):
        engine = scripted_engine(target, sampled_answers, tree, agreement=agreement)
        completions = engine.generate(prompts(LENGTHS), SAMPLED)
        assert [c.token_ids for c in completions] == [sampled_answers[tuple(p)] for p in prompts(LENGTHS)]
        assert mean_length(completions) > 1.4
    assert len({tuple(ids[:8]) for ids in sampled_answers.values()}) == len(LENGTHS)


def test_untrained_draft_with_shared_noise(target, sampled_answers):
    engine = Engine(target, random_draft(target), TreeConfig(4, 4, 16))
    completions = engine.generate(prompts(LENGTHS), SAMPLED)
    assert [c.token_ids for c in completions] == [sampled_answers[tuple(p)] for p in prompts(LENGTHS)]


def test_preemption_recomputes_without_a_trace(target, greedy_answers):
    """So few pages that running sequences have to give theirs up."""
    engine = scripted_engine(target, greedy_answers, TreeConfig(3, 2, 6), agreement=0.5, pages=24)
    completions = engine.generate(prompts(LENGTHS), GREEDY)
    assert engine.scheduler.preemptions > 0
    assert [c.token_ids for c in completions] == [greedy_answers[tuple(p)] for p in prompts(LENGTHS)]
    assert engine.scheduler.allocator.used == 0


@pytest.mark.parametrize("chunk", [1, 5, 8, 13])
def test_chunked_prefill(target, greedy_answers, chunk):
    engine = scripted_engine(target, greedy_answers, TreeConfig(4, 4, 16), prefill_tokens=chunk)
    completions = engine.generate(prompts(LENGTHS), GREEDY)
    assert [c.token_ids for c in completions] == [greedy_answers[tuple(p)] for p in prompts(LENGTHS)]


def test_ends_exactly_at_the_context_limit(target):
    prompt = prompts([250])[0]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    (expected,) = Engine(target).generate([prompt], params)
    assert len(expected.token_ids) == 6 and expected.finish_reason == "length"
    engine = scripted_engine(target, {tuple(prompt): expected.token_ids}, TreeConfig(5, 3, 32))
    (completion,) = engine.generate([prompt], params)
    assert completion.token_ids == expected.token_ids and completion.finish_reason == "length"
    (last,) = Engine(target, random_draft(target)).generate([prompts([255])[0]], params)
    assert len(last.token_ids) == 1 and last.finish_reason == "length"


def test_stop_token_inside_an_accepted_run(target, greedy_answers):
    """The stop token itself and everything behind it in the run are dropped; it counts as emitted by its step."""
    prompt = prompts(LENGTHS)[3]
    answer = greedy_answers[tuple(prompt)]
    for place in range(1, 7):
        stop = answer[place]
        params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, stop_token_ids=(stop,))
        (expected,) = Engine(target).generate([prompt], params)
        (completion,) = scripted_engine(target, greedy_answers, TreeConfig(5, 3, 32)).generate([prompt], params)
        assert completion.token_ids == expected.token_ids == answer[: answer.index(stop)]
        assert (completion.finish_reason, completion.stop_token) == ("stop", stop)
        assert sum(step.emitted for step in completion.steps) == len(
            completion.token_ids
        )  # prefill's token out, stop token in
        assert all(step.accepted <= step.emitted for step in completion.steps)


def test_logprobs_equal_plain(target, greedy_answers):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=3)
    reference = Engine(target).generate(prompts(LENGTHS), params)
    completions = scripted_engine(target, greedy_answers, TreeConfig(4, 4, 16)).generate(prompts(LENGTHS), params)
    for expected, got in zip(reference, completions, strict=True):
        assert [entry.token_id for entry in got.logprobs] == got.token_ids
        for a, b in zip(expected.logprobs, got.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [v for _, v in a.top] == pytest.approx([v for _, v in b.top], abs=1e-4)
            assert a.logprob == pytest.approx(dict(a.top)[a.token_id], abs=1e-6)
