"""The judge of a training run measures what serving would show."""

import pytest

from draft_model.checkpoint import load_draft
from spec import judge
from spec.suites import load_suite


@pytest.fixture
def two_prompts(monkeypatch):
    monkeypatch.setattr(judge, "load_suite", lambda name: load_suite(name, 2))


def test_result_has_what_the_loop_chooses_by(monkeypatch, two_prompts, untrained_draft):
    monkeypatch.setattr(judge, "TOKENS", 12)
    draft = load_draft(untrained_draft)
    result = judge.served_acceptance("m3-tiny")(draft, None)
    assert result["prompts"] == 2 and result["tokens"] == 12 and result["chain"] == 3
    assert 1 <= result["al"] <= 4 and 1 <= result["al_sampled"] <= 4
    assert len(result["per_position"]) == 3


def test_the_runs_target_is_served_and_only_without_one_another_is_loaded(monkeypatch, untrained_draft):
    loads, seen = [], []
    real = judge.load_target
    monkeypatch.setattr(judge, "load_target", lambda *a, **k: loads.append(a) or real(*a, **k))
    monkeypatch.setattr(
        judge, "measure_draft", lambda pair, attention: seen.append((pair.draft, pair.target)) or {"al": 1.0}
    )
    measure = judge.served_acceptance("m3-tiny")
    own = real("m3-tiny")
    first, second = load_draft(untrained_draft), load_draft(untrained_draft)
    measure(first, own), measure(second, own)
    assert loads == [] and seen[0][0] is first and seen[1] == (second, own)
    measure(first, None), measure(second, None)
    assert len(loads) == 1 and seen[2][1] is seen[3][1] is not own
