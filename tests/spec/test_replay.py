"""Replayed trees: by hand on a tiny recording, and against real runs of the bundled pair."""

import numpy as np
import pytest
import torch

from serve.tree import TreeConfig
from spec.bench.recording import Recorder, Recording, Text, record
from spec.bench.replay import acceptance, best_static_tree, oracle, replay, walk
from spec.bench.statistics import NOTHING
from spec.bench.sweep import Condition, Contender, sweep
from spec.pair import Pair, load_pair
from spec.suites import load_suite
from target_model.errors import UserError

# Width 2, depth 2: two guesses below the root, and the two children of each; EXPANDED says whose come first.
CHANCES = [
    # first guesses; children of the first expanded one; of the second
    [[0.6, 0.3], [[0.5, 0.2], [0.25, 0.05]]],
    [[0.6, 0.3], [[0.5, 0.2], [0.25, 0.05]]],
    [[0.4, 0.35], [[0.2, 0.1], [0.34, 0.01]]],
    [[0.7, 0.2], [[0.6, 0.05], [0.1, 0.1]]],
    [[0.7, 0.2], [[0.6, 0.05], [0.1, 0.1]]],
]
RANK = [[0, 0], [1, 0], [1, 0], [0, -1], [0, -1]]
EXPANDED = [[0, 1]] * 5


def tiny() -> Recording:
    """One answer of four positions, and one of a single one; the second text's limit allows one level only."""
    score = np.log([[*first, *children[0], *children[1]] for first, children in CHANCES]).astype(np.float32)
    score[4, 2:] = -np.inf
    texts = (Text("s", "a", "c", 1, 0, 10, (7, 7, 7, 7, 7)), Text("s", "b", "c", 1, 1, 10, (7, 7)))
    rank, expanded = np.array(RANK, np.int16), np.array(EXPANDED, np.int16)[:, None]
    return Recording(2, 2, texts, score, expanded, rank, np.zeros(5, np.int32), np.zeros(5, np.float32), {})


@pytest.mark.parametrize(
    ("shape", "accepted", "drafted"),
    [
        (TreeConfig.chain(1), [1, 0, 0, 1, 1], [1, 1, 1, 1, 1]),
        (TreeConfig.chain(2), [2, 0, 0, 1, 1], [2, 2, 2, 2, 1]),
        # Two nodes: at position 1 the second guess (0.3) falls behind 0.6 and 0.5, at position 2 it does not.
        (TreeConfig(2, 2, 3), [2, 0, 1, 1, 1], [2, 2, 2, 2, 2]),
        (TreeConfig(2, 2, 4), [2, 1, 2, 1, 1], [3, 3, 3, 3, 2]),
        (TreeConfig(2, 2, 7), [2, 2, 2, 1, 1], [6, 6, 6, 6, 2]),
        (TreeConfig.static([(0,), (1,)]), [1, 1, 1, 1, 1], [2, 2, 2, 2, 2]),
        (TreeConfig.static([(0,), (1,), (1, 0)]), [1, 2, 2, 1, 1], [3, 3, 3, 3, 2]),
    ],
    ids=str,
)
def test_accepted_and_drafted_by_hand(shape, accepted, drafted):
    found = replay(tiny(), shape)
    assert found.accepted.tolist() == accepted and found.drafted.tolist() == drafted and found.missing == 0


def test_a_walk_steps_over_what_was_accepted():
    # Two and one more from position 0; one from position 3, where the answer ends; one of the other text.
    result = acceptance(tiny(), TreeConfig.chain(2))
    assert (result.steps, result.emitted, result.histogram) == (3, 5, (0, 2, 1))
    alone = walk(tiny(), replay(tiny(), TreeConfig.chain(2)), 2, [False, True])
    assert (alone.steps, alone.emitted) == (1, 1)


def test_the_best_static_tree_takes_the_most_frequent_paths():
    assert best_static_tree(tiny(), 2, 2) == TreeConfig.static([(0,)])
    assert best_static_tree(tiny(), 4, 2) == TreeConfig.static([(0,), (1,), (1, 0)])
    assert best_static_tree(tiny(), 4, 1) == TreeConfig.static([(0,), (1,)])


def test_an_oracle_follows_any_of_the_best():
    assert oracle(tiny(), 1, 2).accepted.tolist() == [2, 0, 0, 1, 1]
    assert oracle(tiny(), 2, 2).accepted.tolist() == [2, 2, 2, 1, 1]


def test_what_was_not_expanded_is_missing_and_what_cannot_be_held_refused():
    recording = tiny()
    recording.expanded[:, 0, 0] = 1  # the best guess was not expanded at all
    assert replay(recording, TreeConfig.chain(2)).missing == 1
    for shape in (TreeConfig.chain(3), TreeConfig(2, 3, 5), TreeConfig.static([(0,), (2,)])):
        with pytest.raises(UserError, match="were recorded"):
            replay(tiny(), shape)


def test_saved_and_loaded(tmp_path):
    tiny().save(tmp_path / "r.npz")
    loaded = Recording.load(tmp_path / "r.npz")
    assert loaded.texts == tiny().texts and (loaded.score == tiny().score).all() and loaded.score.dtype == np.float32
    whole = (tmp_path / "r.npz").read_bytes()
    middle = len(whole) // 2
    for content in (b"no", b"", whole[:middle], whole[:middle] + bytes(40) + whole[middle + 40 :]):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(UserError, match="no recorded run"):
            Recording.load(tmp_path / "bad.npz")


def fp32_pair() -> Pair:
    """Draft and target in fp32: no near tie is decided by rounding."""
    pair = load_pair("m3-tiny", "eagle3", "cpu")
    pair.draft.float()
    return pair


def served(pair: Pair, suites, condition: Condition, shapes, tokens: int):
    """Shape -> what a real run measures."""
    plain = pair.engine(None, 1024)
    contenders = [Contender("eagle3", pair.engine(shape, 1024)) for shape in shapes]
    rows = sweep(plain, contenders, suites, [condition], pair, tokens=tokens, seed=3, advance=lambda *_: None)
    found = dict.fromkeys(shapes, NOTHING)
    for row in rows:
        found[row.shape] += row.acceptance
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replayed_equals_served(temperature):
    """Both turns of a conversation, answers that end by themselves and ones that are cut."""
    pair, condition = fp32_pair(), Condition(temperature)
    suites = {name: load_suite(name, 1).prompts for name in ("mt_bench", "humaneval")}
    recording = record(pair, suites, condition, tokens=28, seed=3, longest=1024, shape=TreeConfig(5, 5, 20))
    static = best_static_tree(recording, 10, 4)
    shapes = [TreeConfig.chain(4), TreeConfig(3, 2, 6), TreeConfig(5, 4, 24), static]
    for shape, real in served(pair, suites, condition, shapes, 28).items():
        replayed = acceptance(recording, shape)
        assert replayed.length == pytest.approx(real.length, rel=0.02), shape
        assert replayed.histogram == real.histogram, shape
    assert [text.turn for text in recording.texts] == [1, 1, 2]


def test_the_targets_branch_is_recorded_though_it_is_not_among_the_best():
    """A recorded tree of width 2 knows the same ranks as one of width 6, as long as they are 0 and 1."""
    pair, suites = fp32_pair(), {"mt_bench": load_suite("mt_bench", 1).prompts}
    narrow, wide = (
        record(pair, suites, Condition(1.0), tokens=24, seed=0, longest=1024, shape=TreeConfig(5, width, 12))
        for width in (2, 6)
    )
    known = ((wide.rank >= 0) & (wide.rank < 2)).cumprod(1)
    assert (narrow.rank == np.where(known, wide.rank, -1)).all() and known.any(0).all()


def test_answers_that_differ_the_second_time_are_left_out(monkeypatch):
    pair, suites = fp32_pair(), {"humaneval": load_suite("humaneval", 2).prompts}
    honest = Recorder.propose

    def upset(self, sequences, limits, noise, shape):
        sequences[0].token_ids[-1] ^= 1  # the first request goes astray
        return honest(self, sequences, limits, noise, shape)

    monkeypatch.setattr(Recorder, "propose", upset)
    settings = {"tokens": 4, "seed": 0, "longest": 512, "shape": TreeConfig(2, 2, 4)}
    recording = record(pair, suites, Condition(0.0), **settings)
    assert [text.prompt for text in recording.texts] == ["HumanEval/1"] and recording.about["answers left out"] == 1
    with pytest.raises(UserError, match="the same twice"):
        record(pair, suites, Condition(0.0), **settings, together=1)


def test_entropy_is_that_of_the_targets_distribution():
    pair = fp32_pair()
    suites = {"humaneval": load_suite("humaneval", 1).prompts}
    recording = record(pair, suites, Condition(0.0), tokens=4, seed=0, longest=512, shape=TreeConfig(2, 2, 4))
    params = Condition(0.0).params(4, 0)
    object.__setattr__(params, "logprobs", pair.target.config.vocab_size)
    (completion,) = pair.engine(None, 512).generate([pair.render(suites["humaneval"][0].turns[0])], params)
    for entry, entropy in zip(completion.logprobs[1:], recording.entropy, strict=True):
        logp = torch.tensor([value for _, value in entry.top], dtype=torch.float64)
        assert -(logp.exp() * logp).sum().item() == pytest.approx(float(entropy), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replayed_is_within_two_percent_of_serving(temperature):
    """In the precisions that serving uses, with the default recorded tree."""
    pair, condition = load_pair("m3-tiny", "eagle3", "cpu"), Condition(temperature)
    suites = {name: load_suite(name, 3).prompts for name in ("mt_bench", "humaneval")}
    recording = record(pair, suites, condition, tokens=48, seed=3, longest=1024)
    shapes = [TreeConfig.chain(8), TreeConfig(5, 4, 32), best_static_tree(recording, 16, 5)]
    for shape, real in served(pair, suites, condition, shapes, 48).items():
        assert acceptance(recording, shape).length == pytest.approx(real.length, rel=0.02), shape
