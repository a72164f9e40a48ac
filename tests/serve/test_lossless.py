"""Speculation never changes an answer: greedy and seeded sampling, trees and chains, alone and crowded, through
preemption.

The drafts follow a script of the plain continuation, so that acceptance is high, middling or only on a side branch as
the test needs it.
"""

import random

import pytest
import torch

from serve.engine import Engine
from serve.request import Request, SamplingParams
from serve.tree import TreeConfig
from target_model.batch import Batch
from target_model.cache import PagedCache
from tests.fixtures import random_target
from tests.serve.drafts import drive, random_draft, scripted_engine

TREES = [TreeConfig(3, 1, 4), TreeConfig(3, 2, 6), TreeConfig(4, 4, 16), TreeConfig(5, 3, 32)]
LENGTHS = [1, 7, 8, 9, 60]  # around the edges of a block of 8
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=11, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def target():
    return random_target(seed=0)


def prompts(lengths=LENGTHS, seed=3) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(300) for _ in range(length)] for length in lengths]


def plain(target, params, batch=None) -> dict[tuple[int, ...], list[int]]:
    """The answers without a draft, each prompt alone."""
    return {tuple(p): Engine(target).generate([p], params)[0].token_ids for p in batch or prompts()}


def mean_length(completions) -> float:
    steps = [step for completion in completions for step in completion.steps]
    return sum(step.emitted for step in steps) / len(steps)


@pytest.fixture(scope="module")
def greedy_answers(target):
    return plain(target, GREEDY)


@pytest.fixture(scope="module")
def sampled_answers(target):
    return plain(target, SAMPLED)


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize(("agreement", "bounds"), [(1.0, (3.0, 6.1)), (0.55, (1.5, 2.5)), (0.0, (1.0, 1.0))])
def test_greedy_equals_plain(target, greedy_answers, tree, agreement, bounds):
    engine = scripted_engine(target, greedy_answers, tree, agreement=agreement)
    completions = engine.generate(prompts(), GREEDY)
    assert [c.token_ids for c in completions] == [greedy_answers[tuple(p)] for p in prompts()]
    assert bounds[0] <= mean_length(completions) <= bounds[1]
    assert engine.scheduler.allocator.used == 0


@pytest.mark.parametrize("tree", TREES[1:], ids=str)
def test_accepts_a_branch_that_is_not_the_first(target, greedy_answers, tree):
    completions = scripted_engine(target, greedy_answers, tree, rank=1).generate(prompts(), GREEDY)
    assert [c.token_ids for c in completions] == [greedy_answers[tuple(p)] for p in prompts()]
    assert mean_length(completions) > 2


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_same_seed_same_text(target, sampled_answers, tree):
    for agreement in (1.0, 0.55):
        engine = scripted_engine(target, sampled_answers, tree, agreement=agreement)
        completions = engine.generate(prompts(), SAMPLED)
        assert [c.token_ids for c in completions] == [sampled_answers[tuple(p)] for p in prompts()]
        assert mean_length(completions) > 1.4
    assert len({tuple(ids[:8]) for ids in sampled_answers.values()}) == len(LENGTHS)


def test_untrained_draft_with_shared_noise(target, sampled_answers):
    engine = Engine(target, random_draft(target), TreeConfig(4, 4, 16))
    completions = engine.generate(prompts(), SAMPLED)
    assert [c.token_ids for c in completions] == [sampled_answers[tuple(p)] for p in prompts()]


def test_penalties_bias_and_min_tokens_act_per_node(target):
    params = SamplingParams(
        temperature=0,
        repetition_penalty=1.3,
        frequency_penalty=0.8,
        presence_penalty=0.5,
        logit_bias={5: -100.0, 17: 2.0},
        max_tokens=40,
        min_tokens=30,
        stop_token_ids=tuple(range(100, 200)),
    )
    answers = plain(target, params)
    assert answers != plain(target, GREEDY) and all(30 <= len(ids) <= 40 for ids in answers.values())
    completions = scripted_engine(target, answers, TreeConfig(4, 4, 16)).generate(prompts(), params)
    assert [c.token_ids for c in completions] == [answers[tuple(p)] for p in prompts()]
    assert mean_length(completions) > 3


def test_crowd_with_staggered_arrivals_and_aborts(target):
    """Twelve requests of mixed kinds come and go; survivors' text and accepted lengths are those of a solo run."""
    chance = random.Random(5)
    batch = prompts([chance.randrange(1, 90) for _ in range(12)], seed=8)
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 1.0, seed=i, max_tokens=chance.randrange(1, 60), ignore_eos=True)
        for i in range(12)
    ]
    solo = {
        i: Engine(target).generate([p], settings)[0].token_ids
        for i, (p, settings) in enumerate(zip(batch, params, strict=True))
    }
    continuations = {tuple(p): solo[i] for i, p in enumerate(batch)}
    tree = TreeConfig(4, 2, 8)
    expected = {}
    for i, (p, settings) in enumerate(zip(batch, params, strict=True)):
        (alone,) = scripted_engine(target, continuations, tree).generate([p], settings)
        expected[i] = [step.accepted for step in alone.steps]
    engine = scripted_engine(target, continuations, tree, prefill_tokens=13)
    requests = [
        Request(str(i), prompt, settings) for i, (prompt, settings) in enumerate(zip(batch, params, strict=True))
    ]
    arrivals = {str(i): chance.randrange(20) for i in range(12)}
    aborts = {"2": 9, "5": 15, "9": 22}
    got = drive(engine, requests, arrivals, aborts)
    for i in set(range(12)) - set(map(int, aborts)):
        assert got[str(i)].token_ids == solo[i]
        assert [step.accepted for step in got[str(i)].steps] == expected[i]


def test_preemption_recomputes_without_a_trace(target, greedy_answers):
    """So few pages that running sequences have to give theirs up."""
    engine = scripted_engine(target, greedy_answers, TreeConfig(3, 2, 6), agreement=0.5, pages=24)
    completions = engine.generate(prompts(), GREEDY)
    assert engine.scheduler.preemptions > 0
    assert [c.token_ids for c in completions] == [greedy_answers[tuple(p)] for p in prompts()]
    assert engine.scheduler.allocator.used == 0


@pytest.mark.parametrize("chunk", [1, 5, 8, 13])
def test_chunked_prefill(target, greedy_answers, chunk):
    engine = scripted_engine(target, greedy_answers, TreeConfig(4, 4, 16), prefill_tokens=chunk)
    completions = engine.generate(prompts(), GREEDY)
    assert [c.token_ids for c in completions] == [greedy_answers[tuple(p)] for p in prompts()]


def test_cache_after_commit_equals_a_fresh_prefill(target, greedy_answers):
    """Target and draft rows of every decided token, and the state the next tree grows from, are those of a cold run."""
    engine = scripted_engine(target, greedy_answers, TreeConfig(4, 4, 16), rank=2)
    batch = prompts([9, 60, 8])
    for i, prompt in enumerate(batch):
        greedy_answers.setdefault(tuple(prompt), plain(target, GREEDY, [prompt])[tuple(prompt)])
        engine.add(Request(str(i), prompt, GREEDY))
    for _ in range(8):
        engine.step()
    drafter, cache = engine.runner.drafter, engine.runner.cache
    with torch.inference_mode():
        drafter.follow([sequence for _, _, sequence in engine.scheduler.running])
    for _, _, sequence in engine.scheduler.running:
        count = len(sequence.token_ids) - 1
        pages = list(range(-(-(count + 1) // cache.page_size)))
        fresh = PagedCache(target.config, len(pages), dtype=torch.float32, device="cpu", draft=drafter.draft.kv_shape)
        with torch.inference_mode():
            output = target(
                Batch.causal(8, "cpu", [sequence.token_ids[:-1]], [0], [pages]), fresh, drafter.draft.config.taps
            )
            rows = Batch.causal(8, "cpu", [sequence.token_ids[1:]], [1], [pages])
            states = drafter.draft(rows, drafter.draft.project(output.aux), fresh.draft())
        for live, cold in ((cache.k, fresh.k), (cache.v, fresh.v), (cache.index_k, fresh.index_k)):
            torch.testing.assert_close(
                live[:, sequence.pages].flatten(1, 2)[:, :count], cold.flatten(1, 2)[:, :count], atol=1e-5, rtol=0
            )
        for live, cold in ((cache.draft_k, fresh.draft_k), (cache.draft_v, fresh.draft_v)):
            torch.testing.assert_close(
                live[sequence.pages].flatten(0, 1)[1 : count + 1], cold.flatten(0, 1)[1 : count + 1], atol=1e-5, rtol=0
            )
        torch.testing.assert_close(sequence.root_state, states[-1], atol=1e-4, rtol=0)


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
    prompt = prompts()[3]
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
    reference = Engine(target).generate(prompts(), params)
    completions = scripted_engine(target, greedy_answers, TreeConfig(4, 4, 16)).generate(prompts(), params)
    for expected, got in zip(reference, completions, strict=True):
        assert [entry.token_id for entry in got.logprobs] == got.token_ids
        for a, b in zip(expected.logprobs, got.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [v for _, v in a.top] == pytest.approx([v for _, v in b.top], abs=1e-4)
            assert a.logprob == pytest.approx(dict(a.top)[a.token_id], abs=1e-6)
