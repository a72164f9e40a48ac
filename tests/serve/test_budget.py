"""The adaptive budget: near the best of all fixed shapes on easy, hard and mixed prompts by a fixed cost table, and
never a different answer.
"""

import gc
import weakref
from dataclasses import replace

import pytest

from serve.budget import OFF, Budget, Cost, CostTable, Record, expected
from serve.engine import Engine
from serve.measure import measure_costs
from serve.request import Request, SamplingParams
from serve.tree import Tree, TreeConfig
from target_model.errors import UserError
from tests.fixtures import random_target
from tests.serve.drafts import drive, plain, prompts, random_draft, scripted_engine

SHAPES = (OFF, TreeConfig.chain(1), TreeConfig.chain(3), TreeConfig(2, 2, 5), TreeConfig(4, 3, 12))
DEFAULT = TreeConfig(2, 2, 5)
GREEDY = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


def table(per_token: float, per_level: float, fixed: float = 1.0) -> CostTable:
    """Seconds: a step reads the weights once (`fixed`), then pays for each token verified and each level drafted."""
    costs = []
    for shape in SHAPES:
        for batch in (1, 16):
            for context in (32, 256):
                draft = per_level * shape.depth * (1 + 0.1 * batch) if shape != OFF else 0.0
                costs.append(
                    Cost(shape, batch, context, draft, fixed + per_token * shape.nodes * batch + context / 1e4)
                )
    return CostTable(tuple(costs))


CHEAP, DEAR = table(per_token=0.02, per_level=0.1), table(per_token=0.5, per_level=0.4)


@pytest.fixture(scope="module")
def target():
    return random_target(seed=0)


BATCH = prompts([5, 12, 20, 9, 30, 3, 17, 8])


@pytest.fixture(scope="module")
def answers(target):
    return plain(target, GREEDY, BATCH)


def run(target, answers, costs: CostTable, agreement: float, shape: TreeConfig | None = None, together: int = 1):
    """Answers in groups of `together`, and the time of all verify steps by the table, adaptive without `shape`."""
    engine = scripted_engine(target, answers, TreeConfig(4, 3, 12), agreement=agreement, costs=costs)
    seconds, shapes = 0.0, []
    choose = engine.budget.choose

    def watched(ids, kinds, contexts, limits, waiting):
        nonlocal seconds
        chosen = choose(ids, kinds, contexts, limits, waiting)
        chosen = chosen if shape is None else shape
        seconds += costs.seconds(len(ids), sum(contexts) // len(contexts))[chosen]
        shapes.append(chosen)
        return chosen

    engine.budget.choose = watched
    texts = []
    for first in range(0, len(BATCH), together):
        group = [Request(str(i), prompt, GREEDY) for i, prompt in enumerate(BATCH[first : first + together])]
        texts += [completion.token_ids for completion in drive(engine, group).values()]
    assert texts == [answers[tuple(prompt)] for prompt in BATCH]
    return seconds, shapes


@pytest.mark.parametrize(("costs", "together", "agreement"), [(CHEAP, 4, 0.95), (CHEAP, 4, 0.5), (DEAR, 4, 0.0)])
def test_not_slower_than_plain_or_the_default(target, answers, costs, together, agreement):
    check(target, answers, costs, together, agreement)


@pytest.mark.slow
@pytest.mark.parametrize("agreement", [0.95, 0.7, 0.5, 0.3, 0.0])
@pytest.mark.parametrize(("costs", "together"), [(CHEAP, 1), (CHEAP, 4), (DEAR, 1), (DEAR, 4)])
def test_more_agreements_and_costs(target, answers, costs, together, agreement):
    check(target, answers, costs, together, agreement)


def check(target, answers, costs, together, agreement) -> None:
    adaptive, shapes = run(target, answers, costs, agreement, None, together)
    fixed = {shape: run(target, answers, costs, agreement, shape, together)[0] for shape in (OFF, DEFAULT)}
    assert adaptive <= 1.05 * min(fixed.values())
    if agreement == 0.0 or costs is DEAR and agreement < 0.9:
        assert shapes.count(OFF) > 0.8 * len(shapes)
    if agreement == 0.95 and costs is CHEAP:
        assert adaptive < 0.9 * fixed[DEFAULT]


def test_same_table_same_choices(target, answers):
    assert run(target, answers, CHEAP, 0.6, None, 8) == run(target, answers, CHEAP, 0.6, None, 8)


def test_requests_are_told_apart():
    """Of two requests, the one whose drafts are accepted is expected to go on so."""
    budget = Budget(CHEAP)
    chain = Tree([0, 1, 2, 3], [-1, 0, 1, 2])

    def meet(*names: str, kind: str = "greedy") -> None:
        budget.choose(list(names), [kind] * len(names), [64] * len(names), [8] * len(names))

    meet("easy", "hard", "new")
    for _ in range(20):
        budget.learn("easy", chain, [1, 2, 3])
        budget.learn("hard", chain, [])
    easy, hard = (budget._outlook(name)[TreeConfig.chain(3)][-1] for name in ("easy", "hard"))
    assert easy > 2 and hard < 0.5
    assert 0.5 < budget._outlook("new")[TreeConfig.chain(3)][-1] < 2
    meet("easy", "hard", "new")
    for name in ("easy", "hard", "new"):
        budget.forget(name)
    meet("easy", "hard", "new")
    budget.learn("easy", chain, [1])  # of a request that took over the name
    assert budget._outlook("easy")[TreeConfig.chain(3)][-1] < 2


def test_sampled_requests_do_not_suffer_from_greedy_ones():
    """What a new request can expect is what others of its kind met."""
    budget = Budget(CHEAP)
    budget.choose(["g", "s"], ["greedy", "sampled"], [64, 64], [8, 8])
    for _ in range(20):
        budget.learn("g", Tree([0, 1, 2, 3], [-1, 0, 1, 2]), [1, 2, 3])
        budget.learn("s", Tree([0, 1, 2, 3], [-1, 0, 1, 2]), [])
    budget.choose(["new g", "new s"], ["greedy", "sampled"], [64, 64], [8, 8])
    greedy, sampled = (budget._outlook(name)[TreeConfig.chain(3)][-1] for name in ("new g", "new s"))
    assert greedy > 2 and sampled < 0.5


def test_a_choice_stands_for_some_steps(monkeypatch):
    """Until others join, or nobody can take as many drafted tokens; that one of several cannot does not matter."""
    budget = Budget(CHEAP)
    for name in ("a", "b"):
        budget.choose([name], ["greedy"], [64], [8])
        for _ in range(4):  # nothing is left to look at
            budget.learn(name, Tree([0, 1], [-1, 0]), [1])
    choices, choose = [], budget._choice
    monkeypatch.setattr(budget, "_choice", lambda *asked: choices.append(asked[0]) or choose(*asked))

    def steps(ids, limits):
        before = len(choices)
        for limit in limits:
            budget.choose(ids, ["greedy"] * len(ids), [64] * len(ids), limit)
        return len(choices) - before

    assert steps(["a", "b"], [[left, 50] for left in range(8, 0, -1)]) == 1
    assert steps(["a", "b"], [[50, 50]]) == 1
    assert steps(["a"], [[50], [50]]) == 1
    assert steps(["a"], [[left] for left in range(budget.depth, 0, -1)]) == budget.depth - 1
    budget.forget("a")
    assert steps(["a"], [[1]]) == 1


def test_a_choice_not_to_draft_stands_longer(monkeypatch):
    """Nothing is learnt meanwhile."""
    monkeypatch.setattr("serve.budget.FIRST_LOOKS", 0)
    budget, choices = Budget(DEAR), []
    choose = budget._choice
    monkeypatch.setattr(budget, "_choice", lambda *asked: choices.append(asked[0]) or choose(*asked))
    assert all(budget.choose(["a"], ["greedy"], [64], [8]) == OFF for _ in range(64))
    assert len(choices) == 2


LARGEST = TreeConfig(4, 3, 12)


def used(budget: Budget, requests: str, best: TreeConfig, other: TreeConfig, faster: float) -> TreeConfig:
    """Makes `best` the fastest shape for these requests, and so the one in use; then `other` is so much faster."""
    for each, bonus in ((best, 1.2), (other, faster)):
        for request in requests:
            budget.choose([request], ["greedy"], [64], [8])
            budget.learn(request, Tree([0, 1, 2, 3], [-1, 0, 1, 2]), [1, 2])
        outlook = budget._outlook(requests[0])
        speeds = {shape: (1 + outlook[shape][-1]) / cost for shape, cost in budget.table.seconds(1, 64).items()}
        seconds = (1 + outlook[each][-1]) / (bonus * max(speeds.values()))
        costs = [replace(c, draft=0.0, verify=seconds) if c.shape == each else c for c in budget.table.costs]
        budget.table = replace(budget.table, costs=tuple(costs))
        budget._chosen, budget.saved = None, 0.0
        chosen = budget.choose([requests[0]], ["greedy"], [64], [8])
    return chosen


@pytest.mark.parametrize(("best", "other"), [(TreeConfig.chain(3), TreeConfig.chain(1)), (TreeConfig.chain(3), LARGEST),
                                             (LARGEST, TreeConfig.chain(3))], ids=str)  # fmt: skip
def test_a_shape_in_use_is_kept_while_another_is_hardly_better(best, other):
    assert used(Budget(CHEAP), "aaaaaa", best, other, 1.02) == best
    assert used(Budget(CHEAP), "aaaaaa", best, other, 1.06) == other


def test_the_end_of_an_answer_says_nothing_of_the_next():
    """What is best for its last token is not the shape in use then."""
    budget = Budget(CHEAP)
    for _ in range(20):
        deep = budget.choose(["a"], ["greedy"], [64], [8])
        budget.learn("a", Tree([0, 1, 2, 3, 4], [-1, 0, 1, 2, 3]), [1, 2, 3, 4])
    assert deep.depth > 1 and budget._in_use == deep
    assert budget.choose(["a"], ["greedy"], [64], [1]).depth == 1
    assert budget._in_use == deep


def test_rows_that_wait_speak_against_drafting():
    """Where a chain of 3 is worth its cost, but rows of the draft are dear, whoever has not drafted for long goes on
    without; where kept tokens are, trees keep one.
    """
    cases = (
        (0, 0, 0, 400, 3),
        (0.1, 0, 0.1, 1, 3),
        (0.1, 0, 0.1, 400, 0),
        (0, 0, 2, 1, 1),
        (2, 0, 0, 1, 3),
        (0, 40, 0, 1, 3),
        (0, 40, 0, 2, 0),
    )
    for row, wake, kept, waiting, depth in cases:
        budget = Budget(CostTable(CHEAP.costs, row, wake, kept))
        for _ in range(40):
            budget.choose(["a"], ["greedy"], [64], [8], 1)
            budget.learn("a", Tree([0, 1, 2, 3], [-1, 0, 1, 2]), [1, 2, 3])
        assert budget.choose(["a"], ["greedy"], [64], [0], 1) == OFF
        budget.saved = 0.0
        shape = budget.choose(["b"], ["greedy"], [64], [8], waiting)
        assert depth == (0 if shape == OFF else min(shape.depth, 3))


def test_a_look_pays_for_the_rows_that_wait():
    """Where plain decoding is best, drafting is looked at now and then; the dearer the draft's wake, the less often."""
    looks = []
    for wake in (0.0, 60.0):
        budget = Budget(CostTable(DEAR.costs, wake=wake))
        for _ in range(6000):
            shape = budget.choose(["a"], ["greedy"], [64], [8], 3)
            if shape != OFF:
                budget.learn("a", Tree([0, 1, 2], [-1, 0, 0]), [])
        looks.append(budget.overall["greedy"].steps)
    assert looks[0] > 10 and 0 < looks[1] < 4


@pytest.fixture
def drafted(target, answers, monkeypatch):
    """Nodes drafted in each step of an answer, with these `constants` of the budget."""

    def run(costs: CostTable, agreement: float, device_step: bool, **constants: float) -> list[int]:
        for name, value in constants.items():
            monkeypatch.setattr(f"serve.budget.{name}", value)
        options = {"agreement": agreement, "costs": costs, "device_step": device_step}
        (answer,) = scripted_engine(target, answers, LARGEST, **options).generate(BATCH[:1], GREEDY)
        return [step.drafted for step in answer.steps]

    return run


@pytest.mark.parametrize("device_step", [False, True])
def test_a_look_comes_about_and_counts(drafted, device_step):
    """Also where a plain step has been begun before it: one drafted step each, until it is known that drafting pays."""
    costs = table(per_token=0.4, per_level=0.6)
    nodes = drafted(costs, 1.0, device_step, FIRST_LOOKS=0, LOOKING=0.5, PLAIN_REFRESH=4)
    looks = [place for place, count in enumerate(nodes) if count == 11]
    assert looks[1] < 25 and all(nodes[place + 1] != 11 for place in looks)
    assert set(nodes[: looks[1]]) == {0, 11} and 0 not in nodes[looks[1] : -1]


@pytest.mark.parametrize("device_step", [False, True])
def test_a_look_comes_about_behind_other_trees(drafted, device_step):
    """Begun behind the steps in use as any other, without a gap: the largest shape once, then those in use again."""
    nodes = drafted(table(per_token=0.3, per_level=0.05), 0.7, device_step, FIRST_LOOKS=0, LOOKING=0.5)
    looks = [place for place, count in enumerate(nodes) if count == 11]
    assert len(looks) >= 2 and 0 not in nodes[looks[0] : -1]
    assert all(11 not in nodes[place + 1 : place + 6] for place in looks)


def test_no_look_at_what_cannot_be_drafted():
    """Nor is anything paid for it."""
    budget = Budget(DEAR)
    assert budget.choose(["a"], ["greedy"], [64], [0]) == OFF and not budget.looking
    budget.overall["greedy"].steps = 10
    budget.saved = 100.0
    assert budget.choose(["a"], ["greedy"], [64], [0]) == OFF and not budget.looking and budget.saved > 99
    assert budget.choose(["a"], ["greedy"], [64], [8]) == LARGEST and budget.looking and budget.saved > 99
    assert budget.choose(["a", "b"], ["greedy"] * 2, [64] * 2, [8] * 2) == LARGEST  # one more has come: still to be
    budget.learn("a", Tree([0, 1], [-1, 0]), [1])
    assert budget.saved == 0 and budget.choose(["a", "b"], ["greedy"] * 2, [64] * 2, [8] * 2) == OFF


def test_nothing_is_gained_by_what_is_not_accepted():
    """However dear an accepted token is for the next step: a step that keeps none is no shorter than measured."""
    budget = Budget(CostTable(DEAR.costs, kept=2.4))
    for _ in range(40):
        budget.choose(["a"], ["greedy"], [64], [8])
        budget.learn("a", Tree([0, 1, 2], [-1, 0, 0]), [])
    budget.saved = 0.0
    assert budget.choose(["b"], ["greedy"], [64], [8]) == OFF


def test_trees_wake_no_draft():
    """A step that drafts leaves rows for the next one, too; that price is for those who have not drafted."""
    budget = Budget(CostTable(CHEAP.costs, row=0.0, wake=40.0))
    for _ in range(40):
        budget.choose(["a"], ["greedy"], [64], [8], 1)
        budget.learn("a", Tree([0, 1, 2, 3], [-1, 0, 1, 2]), [1, 2, 3])
    budget.saved = 0.0
    assert all(budget.choose(["a"], ["greedy"], [64], [8], 4) != OFF for _ in range(20))
    budget.choose(["a"], ["greedy"], [64], [0], 4)
    assert budget.choose(["a"], ["greedy"], [64], [8], 4) == OFF


def test_expected_tokens_of_a_shape():
    record = Record(3, 2)
    for _ in range(400):
        record.add(Tree([0, 1, 2, 3, 4], [-1, 0, 0, 1, 1]), [1, 3])  # always the first child, and its first
    assert expected(record.chances(), TreeConfig.chain(2))[:2] == pytest.approx([1, 1], abs=0.08)
    only_second = Record(2, 2)
    for _ in range(400):
        only_second.add(Tree([0, 1, 2], [-1, 0, 0]), [2])
    assert expected(only_second.chances(), TreeConfig(1, 2, 3)) == pytest.approx([1], abs=0.08)
    assert expected(only_second.chances(), TreeConfig.chain(1)) == pytest.approx([0], abs=0.08)
    wide, narrow = (
        sum(expected(Record(4, 3).chances(), shape)) for shape in (TreeConfig(4, 3, 12), TreeConfig.chain(3))
    )
    assert wide > narrow


def test_an_engine_that_starts_over_has_met_nobody(target, answers):
    engine = scripted_engine(target, answers, TreeConfig.chain(3), costs=CHEAP)
    engine.generate(BATCH[:2], GREEDY)
    assert engine.budget.overall["greedy"].steps > 0
    engine.start_over()
    assert engine.budget.overall["greedy"].steps == 0 and engine.budget.table is CHEAP


def test_costs_between_and_beyond_what_was_measured():
    shape = TreeConfig.chain(1)
    costs = CostTable(tuple(Cost(shape, b, c, 0.0, 1.0 + b + c / 100) for b in (1, 4) for c in (100, 300)))
    for batch, context in ((1, 100), (4, 300), (2, 200), (8, 300), (3, 500)):
        assert costs.seconds(batch, context)[shape] == pytest.approx(1 + batch + context / 100)
    steep = CostTable(tuple(Cost(shape, 1, c, 0.0, c / 100 - 0.9) for c in (100, 300)))
    assert steep.seconds(1, 0)[shape] == pytest.approx(0.05)


@pytest.mark.parametrize("device_step", [False, True])
def test_a_plain_phase_leaves_the_draft_able_to_go_on(target, answers, device_step):
    """Steps without drafts put the draft's own rows off; when it drafts again they are the ones of a cold run."""
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    trees = []
    for off in (range(0), range(20), range(50), range(15, 40), range(0, 60, 7)):
        engine = scripted_engine(target, answers, TreeConfig.chain(3), agreement=0.0, device_step=device_step)
        engine.add(Request("r", BATCH[2], params))
        for step in range(60):
            engine.tree = OFF if step in off else TreeConfig.chain(3)
            engine.step()
        if device_step:
            engine.runner.device_step.give_up_ahead()
        ((_, _, sequence),) = engine.scheduler.running
        engine.runner.drafter.follow([sequence])
        trees.append((sequence.root_state, engine.runner.cache.draft_k[sequence.pages].flatten(0, 1)[1:78]))
    for state, keys in trees:
        assert (state - trees[0][0]).abs().max() < 1e-4 and (keys - trees[0][1]).abs().max() < 1e-4


@pytest.mark.parametrize("count", [5, 12])
@pytest.mark.parametrize("device_step", [False, True])
def test_rows_that_have_waited_long_are_computed_a_graph_at_a_time(target, answers, device_step, count, monkeypatch):
    """Two sequences in one pass, so early that nobody has more than eight rows."""
    monkeypatch.setattr("serve.runner.PLAIN_STEPS", 8)
    monkeypatch.setattr("serve.runner.ROWS", (8, 16))
    engine = scripted_engine(target, answers, TreeConfig.chain(3), agreement=0.0, device_step=device_step)
    engine.tree = OFF
    for number, prompt in enumerate([*BATCH, *prompts([6, 7, 10, 11])][:count]):
        engine.add(Request(str(number), prompt, GREEDY))
    passes, follow = [], engine.runner.drafter.follow
    while not all(s.decoding for _, _, s in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    monkeypatch.setattr(engine.runner.drafter, "follow", lambda some: passes.append(len(some)) or follow(some))
    for _ in range(30):
        engine.step()
        assert all(len(sequence.taps) <= 8 for _, _, sequence in engine.scheduler.running)
    assert max(passes) == 2 and sum(passes) >= count * (30 // 8)


@pytest.mark.parametrize("device_step", [False, True])
def test_measured_table(target, device_step, monkeypatch):
    """Every shape at every pair of batch and context, with a positive time, sampled and greedy; no cache stays."""
    asked, caches = [], []

    class Watched(Engine):
        def add(self, request):
            asked.append((self.runner.device_step is not None, request.params.greedy))
            cache = self.runner.cache
            if all(each() is not cache for each in caches):
                assert all(each() is None for each in caches)
                caches.append(weakref.ref(cache))
            super().add(request)

    monkeypatch.setattr("serve.measure.Engine", Watched)
    shapes = (OFF, TreeConfig.chain(2), TreeConfig(2, 2, 5))
    options = {"max_running": 4, "context": 256, "shapes": shapes, "greedy": True, "device_step": device_step}
    gc.disable()  # nobody else collects meanwhile
    try:
        costs = measure_costs(target, random_draft(target), **options)
    finally:
        gc.enable()
    assert costs.shapes == shapes and costs.row >= 0 and costs.wake >= 0
    assert costs.kept == (0 if device_step else costs.row)
    assert asked == [(device_step, greedy) for batch in (1, 4) for _ in range(2) for greedy in (False, True)
                     for _ in range(batch)]  # fmt: skip
    for measured in (costs.costs, costs.greedy):
        assert len(measured) == len(set(measured)) == 3 * 2 * 2
        assert {(c.batch, c.context) for c in measured} == {(1, 64), (1, 67), (4, 64), (4, 67)}
        assert all(0 < c.verify < 10 for c in measured)


def test_a_context_too_short_to_measure_in(target):
    with pytest.raises(UserError, match=r"takes \d+ tokens of context, and the target has 256"):
        measure_costs(target, random_draft(target), max_running=1, context=256)


def test_sampled_steps_stand_for_all_on_a_cpu(target):
    options = {"max_running": 1, "context": 64, "shapes": (OFF, TreeConfig.chain(1))}
    assert not measure_costs(target, random_draft(target), **options).greedy


def test_greedy_steps_have_costs_of_their_own():
    """Where drafting is dear but for greedy requests, only they are drafted for, and only among themselves."""
    chosen = []
    for kinds in (["greedy", "greedy"], ["greedy", "sampled"], ["sampled", "sampled"]):
        budget = Budget(replace(table(per_token=6.0, per_level=1.0), greedy=CHEAP.costs))
        ids = ["a", "b"]
        for _ in range(40):
            shape = budget.choose(ids, kinds, [64, 64], [8, 8])
            for each in ids:
                budget.learn(each, Tree([0, 1, 2, 3], [-1, 0, 1, 2]), [1, 2, 3])
        budget.saved = 0.0
        chosen.append(shape != OFF)
    assert chosen == [True, False, False]
