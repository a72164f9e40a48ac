"""Reused pages of an earlier request change nothing but the time: answers and accepted counts are a cold run's."""

import dataclasses
import random
from statistics import mean

import pytest
import torch

from serve.budget import OFF
from serve.engine import Engine
from serve.pages import PageAllocator, prefix_keys
from serve.request import ImageSpan, Request, SamplingParams, Sequence
from serve.tree import TreeConfig
from tests.fixtures import random_target
from tests.serve.drafts import drive, random_draft

TREE = TreeConfig(4, 3, 12)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True)
SETTINGS: dict[str, bool] = {}


@pytest.fixture(autouse=True, params=[False, True], ids=["general", "device"])
def step(request, monkeypatch):
    """Both kinds of step."""
    monkeypatch.setitem(SETTINGS, "device_step", request.param)


@pytest.fixture(scope="module")
def target():
    """With flat logits an untrained draft that knows the noise guesses right about half the time."""
    model = random_target(seed=0)
    model.lm_head.weight.data *= 0.01
    return model


def tokens(count: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(300) for _ in range(count)]


def make(target, **settings) -> Engine:
    return Engine(target, random_draft(target), TREE, **SETTINGS, **settings)


def ask(engine: Engine, prompt: list[int], params: SamplingParams = SAMPLED, **fields):
    return drive(engine, [Request("r", prompt, params, **fields)])["r"]


def trace(completion) -> tuple:
    return completion.token_ids, [step.accepted for step in completion.steps]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("shared", "hit"), [(7, 0), (8, 8), (9, 8), (64, 64), (65, 64), (71, 64), (100, 96)])
def test_a_shared_prefix(target, params, shared, hit):
    first, second = tokens(100), tokens(shared) + tokens(20, seed=2)
    cold = ask(make(target), second, params)
    engine = make(target)
    ask(engine, first, params)
    warm = ask(engine, second, params)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, hit)
    assert trace(warm) == trace(cold)
    assert engine.stats()["cached_prompt_tokens"] == hit
    assert engine.stats()["prefill_tokens"] == 100 + len(second) - hit


def test_the_drafts_guesses_are_right_often_enough_to_tell(target):
    """Without this, equal accepted counts would prove nothing."""
    assert 1 < mean(trace(ask(make(target), tokens(100)))[1]) < 3


@pytest.mark.parametrize("length", [1, 8, 9, 16, 17, 120])
def test_the_same_prompt_again_leaves_a_token_to_compute(target, length):
    engine = make(target)
    cold = ask(engine, tokens(length))
    warm = ask(engine, tokens(length))
    assert warm.cached_tokens == (length - 1) // 8 * 8
    assert trace(warm) == trace(cold)


def test_the_draft_continues_with_the_taps_kept_with_the_page(target):
    """The first draft row behind a hit reads the taps of the last cached position, which no K/V cache holds."""
    engine, prompt = make(target), tokens(24)
    ask(engine, prompt)
    broken = make(target)
    ask(broken, prompt)
    states = []
    for each in (engine, broken):
        if each is broken:
            each.runner.drafter.page_taps.zero_()
        each.add(Request("r", prompt, SAMPLED))
        each.step()
        ((_, _, sequence),) = each.scheduler.running
        states.append((sequence.root_state.clone(), each.runner.cache.draft_k[sequence.pages[2], 0].clone()))
        each.abort("r")
    assert not torch.allclose(states[0][1], states[1][1])
    fresh = make(target)
    fresh.add(Request("r", prompt, SAMPLED))
    fresh.step()
    ((_, _, sequence),) = fresh.scheduler.running
    torch.testing.assert_close(states[0][0], sequence.root_state, atol=1e-4, rtol=0)
    torch.testing.assert_close(states[0][1], fresh.runner.cache.draft_k[sequence.pages[2], 0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("prompt_length", [16, 19])
def test_a_page_is_offered_when_the_draft_has_followed(target, prompt_length):
    """An answer without drafts leaves the draft behind, also at the end of a page: what the target alone has filled is
    of no use to others yet.
    """
    engine = make(target)
    engine.tree = OFF
    prompt = tokens(prompt_length)
    answer = ask(engine, prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)).token_ids
    engine.tree = TREE
    following = prompt + answer + tokens(9, seed=4)
    warm = ask(engine, following)
    assert warm.cached_tokens == (prompt_length - 1) // 8 * 8
    assert trace(warm) == trace(ask(make(target), following))


def test_a_conversation_reuses_its_own_answer(target):
    """Pages that decoding filled (commits of accepted nodes) serve the next turn as well as prefilled ones."""
    engine = make(target)
    prompt = tokens(30)
    answer = ask(engine, prompt, GREEDY).token_ids
    following = prompt + answer + tokens(5, seed=9)
    warm = ask(engine, following)
    assert warm.cached_tokens >= 40
    assert trace(warm) == trace(ask(make(target), following))


def test_twins_wait_for_the_page_that_the_other_computes(target):
    """Answers to one prompt, asked for at once: the prompt is computed once."""
    prompt = tokens(61)
    requests = [Request(str(i), prompt, SAMPLED, choice_index=i) for i in range(3)]
    engine = make(target, prefill_tokens=20)
    got = drive(engine, requests)
    assert [got[str(i)].cached_tokens for i in range(3)] == [0, 56, 56]
    for i in range(3):
        assert trace(got[str(i)]) == trace(ask(make(target), prompt, choice_index=i))
    assert len({tuple(c.token_ids) for c in got.values()}) == 3


def test_a_twin_is_not_lost_with_its_leader(target):
    prompt = tokens(61)
    engine = make(target, prefill_tokens=10)
    got = drive(engine, [Request(str(i), prompt, SAMPLED) for i in range(2)], aborts={"0": 2})
    assert trace(got["1"]) == trace(ask(make(target), prompt))


def test_few_pages_evict_and_preempt_without_a_trace(target):
    """Many prompts, two of each, through a cache that holds two of them: everything is evicted again and again."""
    prompts = [tokens(40, seed=seed) for seed in range(5)]
    expected = [trace(ask(make(target), prompt)) for prompt in prompts]
    engine = make(target, pages=23)
    requests = [Request(f"{turn}{i}", prompts[i], SAMPLED) for i in range(5) for turn in range(3)]
    got = drive(engine, requests, {request.id: 2 * n for n, request in enumerate(requests)})
    for request in requests:
        assert trace(got[request.id]) == expected[int(request.id[1])]
    stats = engine.stats()
    assert stats["pages_evicted"] > 10 and stats["preemptions"] > 0 and stats["cached_prompt_tokens"] > 0


def test_images_and_engines_do_not_share_keys():
    def keys(salt=b"", **fields):
        return prefix_keys(Sequence(Request("r", tokens(40), GREEDY, **fields)), salt, 8)

    plain, span = keys(), ImageSpan(10, 14, b"cat")
    seen = keys(images=(span,))
    assert plain == keys() and len(plain) == 5
    assert plain[0] == seen[0] and not set(plain[1:]) & set(seen[1:])
    for other in (ImageSpan(10, 14, b"dog"), ImageSpan(10, 15, b"cat"), ImageSpan(9, 14, b"cat")):
        assert not set(keys(images=(other,))[1:]) & set(seen)
    assert not set(keys(salt=b"fp8")) & set(plain)


def test_salt_covers_dtype_reuse_options_and_draft():
    target = random_target(seed=0)
    salts = set()
    for config in (target.config, dataclasses.replace(target.config, use_index_cache=True, index_topk_freq=2)):
        target.config = config
        for draft in (None, random_draft(target), random_draft(target, norm_output=False)):
            for dtype in (None, torch.float8_e4m3fn):
                salts.add(Engine(target, draft, pages=8, kv_dtype=dtype).scheduler.salt)
    assert len(salts) == 12


def test_allocator_evicts_the_least_recently_used_leaf_first():
    allocator = PageAllocator(6)
    chains = {}
    for name in "ab":
        chains[name] = allocator.allocate(2)
        for depth, page in enumerate(chains[name]):
            allocator.publish(page, f"{name}{depth}".encode())
        allocator.release(chains[name])
    assert (allocator.free, allocator.used, allocator.cached) == (2, 0, 4)
    allocator.release(allocator.take_prefix([b"a0", b"a1"]))
    assert allocator.allocate(7) is None
    allocator.allocate(3)
    assert [allocator.holds(key) for key in (b"a0", b"a1", b"b0", b"b1")] == [True, True, True, False]
    allocator.allocate(2)
    assert [allocator.holds(key) for key in (b"a0", b"a1", b"b0", b"b1")] == [True, False, False, False]
    assert allocator.take_prefix([b"a0", b"a1"]) == chains["a"][:1]
    assert (allocator.free, allocator.used, allocator.cached) == (0, 6, 0)


def test_an_allocator_that_forgets_begins_anew():
    """It hands out the same pages as a new one, and keeps those that are in use."""
    allocator = PageAllocator(6)
    held = allocator.allocate(1)
    for name in "abc":
        pages = allocator.allocate(2)
        allocator.publish(pages[1], name.encode())
        allocator.release(pages)
    assert (allocator.free, allocator.used, allocator.cached) == (2, 1, 3)
    allocator.forget()
    assert (allocator.free, allocator.used, allocator.cached, allocator.evictions) == (5, 1, 0, 0)
    assert not any(allocator.holds(key) for key in (b"a", b"b", b"c"))
    allocator.release(held)
    allocator.forget()
    assert allocator.allocate(6) == PageAllocator(6).allocate(6)
