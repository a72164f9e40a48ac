"""Steps that stay on the device decide the same tokens as plain decoding and as the general step. Here they run
operation by operation; on a GPU the same operations are captured (test_gpu.py).
"""

import gc
import itertools
import random
import weakref

import pytest
import torch

from serve.budget import OFF
from serve.engine import Engine
from serve.request import Request, SamplingParams
from serve.tree import TreeConfig
from spec.pair import load_pair
from target_model.errors import UserError
from tests.fixtures import random_target
from tests.serve.drafts import drive, mean_length, plain, prompts, random_draft, scripted_engine

STATIC = TreeConfig.static([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (2, 0, 1)])
TREES = [TreeConfig(3, 1, 4), TreeConfig(3, 2, 6), TreeConfig(4, 4, 16), TreeConfig(5, 3, 32), STATIC]
LENGTHS = [1, 7, 8, 9, 60]
GREEDY = SamplingParams(temperature=0, max_tokens=36, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=11, max_tokens=36, ignore_eos=True)
UNFILTERED = SamplingParams(temperature=1.3, min_p=0.02, seed=11, max_tokens=36, ignore_eos=True)
PARAMS = {"greedy": GREEDY, "sampled": SAMPLED, "unfiltered": UNFILTERED}


@pytest.fixture(scope="module")
def target():
    return random_target(seed=0)


@pytest.fixture(scope="module")
def answers(target):
    return {name: plain(target, params, prompts(LENGTHS)) for name, params in PARAMS.items()}


@pytest.mark.parametrize(
    ("name", "agreement", "rank"),
    [("greedy", 1.0, 0), ("greedy", 0.55, 0), ("greedy", 1.0, 1), ("greedy", 0.0, 0), ("sampled", 0.7, 0),
     ("unfiltered", 0.7, 0)],
)  # fmt: skip
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_equals_plain_decoding(target, answers, tree, name, agreement, rank):
    params = PARAMS[name]
    engine = scripted_engine(target, answers[name], tree, agreement=agreement, rank=rank, device_step=True)
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts(LENGTHS))]
    done = drive(engine, requests, {"1": 2, "3": 9}, {"4": 9})
    for request in requests[:4]:
        assert done[request.id].token_ids == answers[name][tuple(request.prompt_ids)]
    length = mean_length(done.values())
    if agreement == 1.0 and rank < tree.width:
        assert length > (3 if rank == 0 else 1.4)
    assert engine.stats()["accepted_tokens"] > 0 or agreement == 0 or rank >= tree.width


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tree", [None, *TREES], ids=str)
def test_grows_the_same_trees_as_the_general_step(target, tree, params):
    """Same nodes drafted, same nodes kept, request by request, with a real (untrained) draft in fp32."""
    seen = []
    for device_step in (False, True):
        engine = Engine(target, random_draft(target) if tree else None, tree, device_step=device_step)
        requests = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts(LENGTHS))]
        done = drive(engine, requests, {"1": 2, "3": 9})
        seen.append({name: (each.token_ids, each.steps, each.accepted_from_draft) for name, each in done.items()})
    assert seen[0] == seen[1]


def test_greedy_and_sampled_and_general_requests_together(target, answers):
    """A request that asks for log-probabilities or penalties takes the whole batch the general way while it runs."""
    wishes = [GREEDY, SAMPLED, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2), UNFILTERED]
    wishes.append(SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.3, ignore_eos=True))
    wishes.append(SamplingParams(temperature=0, max_tokens=30, min_tokens=20, seed=2))
    batch = [prompts(LENGTHS)[i % 5] for i in range(6)]
    pairs = list(zip(batch, wishes, strict=True))
    expected = [Engine(target).generate([prompt], wish)[0].token_ids for prompt, wish in pairs]
    engine = Engine(target, random_draft(target), TreeConfig(4, 4, 16), device_step=True)
    requests = [Request(str(i), prompt, wish) for i, (prompt, wish) in enumerate(pairs)]
    done = drive(engine, requests, {"2": 6, "4": 15, "5": 3})
    assert [done[str(i)].token_ids for i in range(6)] == expected


def test_plain_steps_run_ahead_of_the_host(target):
    """Without a draft a step is begun before the last one is read; it must not count when anything has come between:
    requests that come, end, hang up, are preempted, or take the batch the general way for a while.
    """
    batch = [prompts(LENGTHS)[i % 5] for i in range(7)]
    wishes = [SamplingParams(temperature=0, max_tokens=30 + 5 * i, ignore_eos=True) for i in range(4)]
    wishes += [SamplingParams(temperature=1.0, top_k=30, seed=i, max_tokens=24, ignore_eos=True) for i in range(2)]
    wishes.append(SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1))
    pairs = list(zip(batch, wishes, strict=True))
    expected = [Engine(target).generate([prompt], wish)[0].token_ids for prompt, wish in pairs]
    for pages in (24, 200):
        engine = Engine(target, pages=pages, device_step=True)
        requests = [Request(str(i), prompt, wish) for i, (prompt, wish) in enumerate(pairs)]
        done = drive(engine, requests, {"1": 3, "2": 4, "4": 11, "5": 19, "6": 14}, {"3": 17})
        for i in (0, 1, 2, 4, 5, 6):
            assert done[str(i)].token_ids == expected[i]
        assert (engine.scheduler.preemptions > 0) == (pages == 24)


def test_the_tree_of_a_plain_step_is_its_root(target):
    """The last decided token, of each sequence."""
    engine, last = Engine(target, device_step=True), {}
    for number, prompt in enumerate(prompts(LENGTHS)):
        engine.add(Request(str(number), prompt, GREEDY))
    while engine.has_work():
        for update in engine.step():
            if update.verified is not None:
                tree = update.verified.tree
                assert (tree.tokens, tree.parents, update.verified.path) == ([last[update.id]], [-1], [])
            last[update.id] = update.token_ids[-1]


@pytest.mark.parametrize("tick", range(4, 12))
def test_a_plain_step_ahead_is_dropped_when_the_general_way_has_come_between(target, tick):
    """One request takes the other two the general way for a single step."""
    wishes = [GREEDY, GREEDY, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=1)]
    requests = [Request(str(i), prompts(LENGTHS)[i + 1], wish) for i, wish in enumerate(wishes)]
    done = drive(Engine(target, device_step=True), requests, {"2": tick})
    for request in requests:
        (expected,) = Engine(target).generate([request.prompt_ids], request.params)
        assert done[request.id].token_ids == expected.token_ids


def test_a_plain_step_ahead_is_dropped_with_the_pages_that_it_wrote_to(target, answers):
    """A preempted sequence comes back in other pages."""
    prompt = prompts(LENGTHS)[2]
    engine = Engine(target, device_step=True)
    engine.add(Request("a", prompt, GREEDY))
    for _ in range(6):
        engine.step()
    scheduler = engine.scheduler
    (entry,) = scheduler.running
    before = list(entry[2].pages)
    scheduler.running.clear()
    scheduler.allocator.release(entry[2].pages)
    entry[2].restart([], 0)
    scheduler.waiting.append(entry)
    kept = scheduler.allocator.allocate(len(before))  # somebody else has them now
    while engine.has_work():
        engine.step()
    assert before[-1] in kept
    assert entry[2].token_ids[len(prompt) :] == answers["greedy"][tuple(prompt)]


@pytest.fixture(scope="module")
def tiny():
    pair = load_pair("m3-tiny", "eagle3", "cpu")
    pair.draft.float()
    return pair


@pytest.mark.parametrize("attention", ["full", "sparse"])
@pytest.mark.parametrize("every", [0, 1, 3])
def test_a_step_ahead_leaves_no_trace_where_it_does_not_count(tiny, every, attention):
    """The trees after it grow from where they would have grown: each step keeps what it keeps without steps ahead."""
    ids = tiny.tokenizer.encode("def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n")
    seen = []
    for device_step in (False, True):
        engine = Engine(
            tiny.target, tiny.draft, TreeConfig(3, 2, 6), device_step=device_step, draft_attention=attention
        )
        for name, wish in (("a", GREEDY), ("b", SAMPLED), ("c", GREEDY)):
            engine.add(Request(name, ids[-ord(name) % 7 :], wish))
        updates = []
        for tick in itertools.count(1):
            updates += engine.step()
            if device_step and every and tick % every == 0:
                engine.runner.device_step.give_up_ahead()
            if not engine.has_work():
                break
        assert sum(update.step.accepted for update in updates if update.step) > 20
        seen.append([(u.id, u.token_ids, u.step and (u.step.drafted, u.step.accepted)) for u in updates])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("every", [0, 2, 5])
def test_shapes_that_change_draft_as_well_as_without_steps_ahead(tiny, every):
    """Plain steps among trees: each has the shape that was asked for before it was begun, and keeps what the general
    step keeps with that shape.
    """
    ids = tiny.tokenizer.encode("def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n")
    shapes = {1: OFF, 3: TreeConfig.chain(2), 6: TreeConfig(3, 2, 6)}
    asked = [6, 6, 6, 6, 6, 1, 6, 6, 1, 1, 1, 6, 3, 3, 3, 1, 1, 6, 1, 3, 3]
    params = [SamplingParams(temperature=t, top_k=20, seed=3, max_tokens=400, ignore_eos=True) for t in (0, 1.0, 0)]

    def run(device_step: bool, nodes: list[int]) -> list[list]:
        engine = Engine(tiny.target, tiny.draft, shapes[6], device_step=device_step)
        for name, wish in zip("abc", params, strict=True):
            engine.add(Request(name, ids[-ord(name) % 7 :], wish))
        engine.step()
        steps = []
        for tick, count in enumerate(nodes):
            engine.tree = shapes[count]
            updates = engine.step()
            steps.append([(u.id, u.token_ids, len(u.verified.tree), u.step.accepted) for u in updates])
            if device_step and every and tick % every == 0:
                engine.runner.device_step.give_up_ahead()
        return steps

    ours = run(True, asked * 3)
    taken = [step[0][2] for step in ours]
    assert set(taken) == set(shapes) and sum(kept for step in ours for *_, kept in step) > 40
    assert run(False, taken) == ours


def test_preemption(target, answers):
    engine = scripted_engine(target, answers["greedy"], TreeConfig(3, 2, 6), agreement=0.5, pages=24, device_step=True)
    completions = engine.generate(prompts(LENGTHS), GREEDY)
    assert engine.scheduler.preemptions > 0
    assert [c.token_ids for c in completions] == [answers["greedy"][tuple(p)] for p in prompts(LENGTHS)]


def test_ends_exactly_at_the_context_limit(target):
    prompt = prompts([250])[0]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    (expected,) = Engine(target).generate([prompt], params)
    engine = scripted_engine(target, {tuple(prompt): expected.token_ids}, TreeConfig(5, 3, 32), device_step=True)
    (completion,) = engine.generate([prompt], params)
    assert completion.token_ids == expected.token_ids and completion.finish_reason == "length"


def test_padding_changes_nothing(target, answers, monkeypatch):
    """As captured steps are: more rows and pages than there are sequences and pages."""
    from serve import step_buffers

    monkeypatch.setattr(
        step_buffers.Size,
        "of",
        staticmethod(lambda n, pages, shape, noise, padded: step_buffers.Size(n + 3, 2 * pages + 5, shape, noise)),
    )
    engine = Engine(target, random_draft(target), TreeConfig(4, 4, 16), device_step=True)
    completions = engine.generate(prompts(LENGTHS), [GREEDY, SAMPLED, UNFILTERED, GREEDY, SAMPLED])
    wanted = ["greedy", "sampled", "unfiltered", "greedy", "sampled"]
    assert [c.token_ids for c in completions] == [
        answers[name][tuple(p)] for name, p in zip(wanted, prompts(LENGTHS), strict=True)
    ]
    spare = engine.runner.cache.num_pages - 1
    assert engine.scheduler.allocator.total == spare  # nobody is ever given the page that padding writes to


def test_the_cache_after_steps_equals_a_fresh_prefill(target, answers):
    prompt = prompts(LENGTHS)[4]
    engine = scripted_engine(target, answers["greedy"], TreeConfig(4, 4, 16), agreement=0.7, device_step=True)
    engine.add(Request("a", prompt, GREEDY))
    for _ in range(9):
        engine.step()
    ((_, _, sequence),) = engine.scheduler.running
    fresh = Engine(target, random_draft(target), TreeConfig(4, 4, 16), device_step=False)
    fresh.add(Request("b", sequence.token_ids[:-1], GREEDY))
    fresh.step()
    ((_, _, other),) = fresh.scheduler.running
    whole = sequence.computed // 8

    def rows(runner, pages, pool):
        return pool(runner.cache)[..., pages[:whole], :, :, :].float()

    for pool in (lambda c: c.k, lambda c: c.v, lambda c: c.draft_k, lambda c: c.index_k[..., None, :]):
        ours, theirs = rows(engine.runner, sequence.pages, pool), rows(fresh.runner, other.pages, pool)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_pages_keep_the_taps_of_their_last_position(target, answers):
    """Who continues behind a page that a step has filled needs them."""
    kept = []
    for device_step in (False, True):
        engine = scripted_engine(target, answers["greedy"], TreeConfig(4, 4, 16), device_step=device_step)
        engine.add(Request("a", prompts(LENGTHS)[4], GREEDY))
        ((_, _, sequence),) = engine.step() and engine.scheduler.running
        while sequence.computed < 90:
            engine.step()
        kept.append(engine.runner.drafter.page_taps[sequence.pages[:10]])
    assert kept[0].abs().amin(1).gt(0).all()
    torch.testing.assert_close(kept[0], kept[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("lengths", [[9], [5, 9, 30]])
@pytest.mark.parametrize("tree", [TreeConfig(4, 2, 12), TreeConfig(4, 3, 12)], ids=str)
def test_synthetic_acceptance(target, tree, lengths):
    """The trees of the wider shape are two levels deep: what one is not deep enough for, others make up; the step after
    the next, where that was begun before.
    """
    runs = []
    for device_step in (False, True):
        engine = Engine(target, random_draft(target), tree, synthetic_acceptance=2.83, device_step=device_step)
        engine.generate(prompts(lengths), SamplingParams(temperature=0, max_tokens=120, ignore_eos=True))
        runs.append(engine.stats())
    assert runs[1]["acceptance_length"] == pytest.approx(2.83, abs=0.1)
    if len(lengths) == 1:
        host, device = (run["accepted_histogram"] for run in runs)
        assert len(host) == len(device) and all(
            abs(a - b) <= (tree.width > 2) for a, b in zip(host, device, strict=True)
        )


def test_nothing_of_a_request_is_kept(target):
    """Neither by steps with drafts nor by plain ones that were begun ahead."""
    for draft in (random_draft(target), None):
        engine = Engine(target, draft, device_step=True)
        for number in range(3):
            engine.add(Request(str(number), prompts([9])[0], GREEDY))
        for _ in range(6):
            engine.step()
        left = [weakref.ref(sequence) for _, _, sequence in engine.scheduler.running]
        for number in range(3):
            engine.abort(str(number))
        gc.collect()
        assert [reference() for reference in left] == [None] * 3


def test_sparse_draft_attention_and_pruned_vocabulary(target):
    wish = SamplingParams(temperature=1.0, top_k=20, seed=5, max_tokens=60, ignore_eos=True)
    batch = prompts([90, 9])
    expected = [Engine(target).generate([prompt], wish)[0].token_ids for prompt in batch]
    draft = random_draft(target, draft_vocab_size=100)
    draft.d2t = torch.tensor(sorted(random.Random(0).sample(range(300), 100))) - torch.arange(100)
    steps = []
    for device_step in (False, True):
        engine = Engine(target, draft, TreeConfig(4, 3, 12), draft_attention="sparse", device_step=device_step)
        completions = engine.generate(batch, wish)
        assert [c.token_ids for c in completions] == expected
        steps.append([c.steps for c in completions])
    assert steps[0] == steps[1]


def test_refuses_rejection_sampling(target):
    with pytest.raises(UserError, match="device_step"):
        Engine(target, random_draft(target), sampling="rejection", device_step=True)


def test_who_starts_over_takes_back_the_step_that_was_begun(target):
    engine = Engine(target, random_draft(target), device_step=True)
    engine.add(Request("a", prompts([9])[0], GREEDY))
    for _ in range(6):
        engine.step()
    assert engine.runner.device_step._ahead is not None
    engine.abort("a")
    engine.start_over()
    assert engine.runner.device_step._ahead is None
