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
    result = judge.served_acceptance("m3-tiny")(draft)
    assert result["prompts"] == 2 and result["tokens"] == 12 and result["chain"] == 3
    assert 1 <= result["al"] <= 4 and 1 <= result["al_sampled"] <= 4
    assert len(result["per_position"]) == 3


def test_target_is_loaded_once_and_only_when_asked(monkeypatch, untrained_draft):
    loads = []
    real = judge.load_target
    monkeypatch.setattr(judge, "load_target", lambda *a, **k: loads.append(a) or real(*a, **k))
    seen = []
    monkeypatch.setattr(judge, "measure_draft", lambda pair: seen.append(pair.draft) or {"al": 1.0})
    measure = judge.served_acceptance("m3-tiny")
    assert loads == []
    first, second = load_draft(untrained_draft), load_draft(untrained_draft)
    measure(first), measure(second)
    assert len(loads) == 1 and seen[0] is first and seen[1] is second
