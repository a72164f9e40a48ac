"""SAMPLING: speculation changes the sampled distribution, penalties or seeds.

Reports R9 (acceptance with other probabilities than the tokens were drawn from) and R19 (only the last token of an
accepted run enters the penalties). R9 (b), whole runs against the exact distribution, is tests/serve/
test_distribution.py. Also tried: candidates that carry all or none of the mass, trees in which a candidate's draw must
not leak into the next one's, penalties with sampling and with a fixed seed, stop tokens instead of end of text, a draft
that is right half the time, settings together.
"""

import pytest
import torch

from serve.engine import Engine
from serve.noise import gumbel, uniform
from serve.request import Request, SamplingParams, Sequence
from serve.sampling import Row, RowSettings, choose_by_rejection, row_settings
from serve.tree import Tree, TreeConfig
from target_model.kernels import ops
from tests.fixtures import random_target
from tests.serve.drafts import mean_length, plain, prompts, scripted_engine

DRAWS = 200_000
# p over 8 tokens, behind the root and behind each token; token 7 is impossible.
ROOT = torch.tensor([0.3, 0.22, 0.17, 0.13, 0.1, 0.05, 0.03, 0.0])
BEHIND = torch.stack([ROOT.roll(token)[torch.arange(8)] for token in range(8)])
TREES = {
    "chain": Tree([0, 1, 1], [-1, 0, 1]),
    "chain of the impossible": Tree([0, 7, 3], [-1, 0, 1]),
    "two wide": Tree([0, 0, 5, 2, 6, 0, 1], [-1, 0, 0, 1, 1, 2, 2]),
    "all of the mass": Tree([0, *range(8)], [-1] + [0] * 8),
}


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
@pytest.mark.parametrize(
    "name", ["two wide", *(pytest.param(n, marks=pytest.mark.slow) for n in TREES if n != "two wide")]
)
def test_r9_fixed_probabilities(mode, name):
    """Total variation of the first two tokens, and of their joint, below 0.01 in 200,000 draws."""
    tree, device = TREES[name], "cpu"
    sequence = Sequence(Request("r", [0], SamplingParams()))
    seeds = list(range(DRAWS))
    logits = [
        ROOT.log() if parent < 0 else BEHIND[token].log()
        for token, parent in zip(tree.tokens, tree.parents, strict=True)
    ]
    drawn = torch.empty(len(tree), DRAWS, dtype=torch.int64)
    for node, (candidates, depth) in enumerate(zip(tree.candidates(), tree.depths(), strict=True)):
        rows = [Row(sequence, ())] * DRAWS
        expanded = logits[node].expand(DRAWS, 8)
        if mode == "coupled":
            settings = row_settings([Row(sequence, (0,) * (4 + depth))], device)
            settings = RowSettings(*(x.expand(DRAWS) for x in settings))._replace(seed=torch.tensor(seeds))
            drawn[node] = ops.sample_tokens(expanded, *settings)
        else:
            noise = gumbel(seeds, [0] * DRAWS, [5 + depth] * DRAWS, 8, device)
            candidate_NW = torch.tensor([candidates or [-1]]).expand(DRAWS, -1)
            numbers = uniform(seeds, [0] * DRAWS, [5 + depth] * DRAWS, candidate_NW.shape[1], device)
            drawn[node] = choose_by_rejection(expanded, rows, noise, (), candidate_NW, numbers)
    joint = torch.zeros(8, 8)
    single = torch.zeros(8)
    steps = 0
    # Draws that accept a node go on behind it; the others' second token is not decided in this step.
    for choices in drawn.T[:50_000].tolist():
        path = tree.accept(choices)
        tokens = [tree.tokens[node] for node in path] + [choices[path[-1] if path else 0]]
        single[tokens[0]] += 1
        if len(tokens) > 1:
            joint[tokens[0], tokens[1]] += 1
            steps += 1
    first = torch.bincount(drawn[0], minlength=8) / DRAWS
    assert 0.5 * (first - ROOT).abs().sum() < 0.01
    assert 0.5 * (single / single.sum() - ROOT).abs().sum() < 0.01
    for token in range(8):
        count = joint[token].sum()
        if count > 5000:
            assert 0.5 * (joint[token] / count - BEHIND[token]).abs().sum() < 0.02
    assert single[7] == 0 and (name == "chain of the impossible") == (steps == 0)


@pytest.fixture(scope="module")
def target():
    return random_target(seed=0)


GREEDY = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
PENALTIES = {
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.8},
    "presence": {"presence_penalty": 1.0},
    "bias": {"logit_bias": {5: -100.0, 17: 5.0}},
    "all": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.8,
        "presence_penalty": 0.5,
        "logit_bias": {5: -100.0, 17: 2.0},
    },
    "sampled": {"temperature": 0.8, "seed": 4, "frequency_penalty": 1.5, "top_k": 20},
}


@pytest.mark.parametrize("tree", [TreeConfig.chain(4), TreeConfig(4, 3, 14)], ids=str)
@pytest.mark.parametrize("name", PENALTIES)
def test_r19_penalties_see_every_accepted_token(looping, tree, name):
    batch = prompts([9, 30])
    params = SamplingParams(**{**GREEDY, **PENALTIES[name]})
    expected = plain(looping, params, batch)
    assert expected != plain(looping, SamplingParams(**GREEDY), batch)
    completions = scripted_engine(looping, expected, tree, agreement=0.9).generate(batch, params)
    assert [c.token_ids for c in completions] == [expected[tuple(p)] for p in batch]
    assert mean_length(completions) > 2.5


@pytest.fixture(scope="module")
def looping():
    """A target that repeats a few tokens, as penalties are for: its head prefers what it has just read."""
    model = random_target(seed=0)
    model.lm_head.weight.data[40:] *= 0.1
    return model


def test_r19_the_target_repeats_itself(looping):
    for tokens in plain(looping, SamplingParams(**GREEDY), prompts([9, 30])).values():
        assert len(set(tokens)) < 40


@pytest.mark.parametrize("minimum", [5, 6, 7])
@pytest.mark.parametrize("tree", [TreeConfig.chain(4), TreeConfig(4, 3, 14)], ids=str)
def test_r19_min_tokens(target, tree, minimum):
    """The text would end at its third token; it has to go on to `minimum`, neither shorter nor several times longer."""
    (prompt,) = prompts([12])
    free = plain(target, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), [prompt])[tuple(prompt)]
    # Half of the vocabulary would end it: soon after the ban is lifted it ends.
    stops = (free[2], *range(150))
    params = SamplingParams(temperature=0, max_tokens=40, min_tokens=minimum, stop_token_ids=stops)
    (expected,) = Engine(target).generate([prompt], params)
    assert minimum <= len(expected.token_ids) < minimum + 12
    script = {tuple(prompt): expected.token_ids + [expected.stop_token or 0]}
    (got,) = scripted_engine(target, script, tree).generate([prompt], params)
    assert (got.token_ids, got.finish_reason, got.stop_token) == (
        expected.token_ids,
        expected.finish_reason,
        expected.stop_token,
    )
    assert mean_length([got]) > 2
