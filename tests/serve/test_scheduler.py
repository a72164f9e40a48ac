"""Who runs when: order, priorities, nobody starves, full queues, and how long a prompt may hold up the others."""

import pytest

from serve.engine import Engine
from serve.request import Request, SamplingParams
from serve.scheduler import PATIENCE
from serve.tree import TreeConfig
from target_model.errors import UserError
from tests.fixtures import random_target
from tests.serve.drafts import check_pages, drive, prompts, random_draft


@pytest.fixture(scope="module")
def target():
    return random_target(seed=0)


def params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def finishing_order(engine: Engine, requests: list[Request]) -> list[str]:
    for request in requests:
        engine.add(request)
    order = []
    while engine.has_work():
        order += [update.id for update in engine.step() if update.finish_reason]
        check_pages(engine)
    return order


def test_first_come_first_served(target):
    """The big one at the head of the queue is not passed by small ones that would fit, nor starved by them."""
    engine = Engine(target, pages=16, max_running=3)
    lengths = [60, 60, 10, 10, 10, 10]
    requests = [Request(str(i), prompt, params(3)) for i, prompt in enumerate(prompts(lengths))]
    assert finishing_order(engine, requests)[:2] == ["0", "1"]


def test_priorities(target):
    engine = Engine(target, max_running=1)
    requests = [
        Request(f"{i}", prompt, params(2), priority=priority)
        for i, (prompt, priority) in enumerate(zip(prompts([5] * 6), (1, 0, 2, -1, 0, 1), strict=True))
    ]
    assert finishing_order(engine, requests) == ["3", "1", "4", "0", "5", "2"]


def test_a_low_priority_waits_but_does_not_starve(target):
    """Requests of higher priority keep coming, one for each that ends; the patient one has its turn in the end."""
    engine = Engine(target, max_running=1)
    (prompt,) = prompts([4])
    engine.add(Request("patient", prompt, params(1), priority=1))
    passed = 0
    for count in range(3 * PATIENCE):
        engine.add(Request(f"{count}", prompt, params(1)))
        finished = [update.id for update in engine.step() if update.finish_reason]
        if finished == ["patient"]:
            break
        passed += 1
    assert passed == PATIENCE - 1


def test_the_last_in_order_is_preempted(target):
    """Not the more important one, however late it came."""
    engine = Engine(target, random_draft(target), TreeConfig(3, 2, 6), pages=20)
    batch = prompts([40, 40, 30])
    requests = [Request(str(i), p, params(40), priority=-1 if i == 2 else 0) for i, p in enumerate(batch)]
    free, victims = engine.scheduler._free, []

    def watched(sequence):
        if sequence.request.id in {str(i) for i in range(3)} and sequence.output_length < 40:
            victims.append(sequence.request.id)
        free(sequence)

    engine.scheduler._free = watched
    drive(engine, requests, {"2": 3})
    assert engine.stats()["preemptions"] > 0
    assert "2" not in victims


def test_the_queue_has_a_limit(target):
    engine = Engine(target, max_running=1, max_waiting=3)
    (prompt,) = prompts([4])
    for i in range(3):
        engine.add(Request(str(i), prompt, params(2)))
    with pytest.raises(UserError, match="queue is full: 3"):
        engine.add(Request("late", prompt, params(2)))
    assert not engine.abort("late")
    engine.step()
    engine.add(Request("late", prompt, params(2)))


def test_what_can_never_fit_is_refused_at_once(target):
    engine = Engine(target, pages=8)
    for length, tokens, message in ((200, 1, "holds 64 slots"), (40, 60, "holds 64 slots"), (256, 1, "holds 256")):
        with pytest.raises(UserError, match=message):
            engine.add(Request("r", prompts([length])[0], params(tokens)))
    assert not engine.has_work()


@pytest.mark.parametrize("budget", [7, 16, 40])
def test_long_prompts_hold_the_others_up_by_their_share_of_a_step(target, budget):
    """While two prompts of 100 tokens come in, the others get tokens in every step, beside at most `budget` of them."""
    engine = Engine(target, random_draft(target), TreeConfig(3, 2, 6), prefill_tokens=budget)
    short = [Request(str(i), prompt, params(60)) for i, prompt in enumerate(prompts([5, 6, 7]))]
    for request in short:
        engine.add(request)
    while engine.stats()["verify_steps"] < 3:
        engine.step()
    for name, prompt in zip("ab", prompts([100, 100], seed=4), strict=True):
        engine.add(Request(name, prompt, params(40)))
    steps, rows = 0, []
    forward = engine.runner.target.forward

    def counting(batch, *rest, **named):
        rows.append(batch.num_rows)
        return forward(batch, *rest, **named)

    engine.runner.target.forward = counting
    try:
        while True:
            rows.clear()
            before = engine.stats()["prefill_tokens"]
            ids = {update.id for update in engine.step()}
            assert engine.stats()["prefill_tokens"] - before <= budget
            assert sum(rows) <= budget + 4 * 6
            assert {"0", "1", "2"} <= ids
            steps += 1
            if "b" in ids:
                break
    finally:
        del engine.runner.target.forward
    assert steps == -(-200 // budget)
