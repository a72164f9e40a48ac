"""A target with random weights, served."""

from serve.load import load_engine
from serve.request import SamplingParams
from target_model.dummy import DummyWeights


def test_serving_it():
    engine, tokenizer, about = load_engine("m3-tiny", None, dummy=DummyWeights("mxfp4", 4), device="cpu", pages=32)
    assert "target m3-tiny: random weights as mxfp4, the first 4 layers" in about.lines
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (completion,) = engine.generate([tokenizer.encode("hello")], params)
    assert len(completion.token_ids) == 5
