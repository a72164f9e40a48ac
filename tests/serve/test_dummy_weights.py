"""A target with random weights, served."""

import pytest

from serve.load import EngineOptions, load_engine
from serve.request import SamplingParams
from target_model.dummy import DummyWeights
from target_model.errors import UserError


def test_serving_it():
    engine, tokenizer, about = load_engine(
        EngineOptions("m3-tiny", None, dummy=DummyWeights("mxfp4", 4), device="cpu", pages=32)
    )
    assert "target m3-tiny: random weights as mxfp4, the first 4 layers" in about.lines
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (completion,) = engine.generate([tokenizer.encode("hello")], params)
    assert len(completion.token_ids) == 5


def test_with_a_random_draft():
    """Speculation runs, guesses nearly nothing and, as ever, changes nothing."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = []
    for draft in ("eagle3", None):
        engine, tokenizer, about = load_engine(
            EngineOptions("m3-tiny", draft, dummy=DummyWeights("mxfp4", 7), device="cpu", pages=64)
        )
        (completion,) = engine.generate([tokenizer.encode("hello")], params)
        answers.append(completion.token_ids)
        assert ("draft eagle3: random weights" in about.lines) == (draft is not None)
        assert (engine.stats()["drafted_tokens"] > 0) == (draft is not None)
    assert answers[0] == answers[1]
    with pytest.raises(UserError, match="a target of 4 layers has no default taps"):
        load_engine(EngineOptions("m3-tiny", "eagle3", dummy=DummyWeights("mxfp4", 4), device="cpu", pages=64))
