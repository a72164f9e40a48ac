"""`spec bench quantization` on two short rows: the figures mean what they say."""

import json
from pathlib import Path

import pytest

from spec.bench import quantization
from spec.bench.quantization import CASES, cache_types, run, weight_error
from target_model.checkpoint import load_target
from target_model.quantise_checkpoint import quantise_checkpoint
from tests.fixtures import random_target, tiny_config, write_checkpoint


def test_cache_types():
    assert cache_types("") == {}
    assert set(cache_types("KV")) == {"kv_dtype"} and set(cache_types("index K")) == {"index_dtype"}
    assert set(cache_types("KV, index K")) == {"kv_dtype", "index_dtype"}


def test_weight_error(tmp_path: Path):
    """Of a plain model none; of two models with different weights about the square root of two."""
    write_checkpoint(tiny_config(), tmp_path / "plain")
    quantise_checkpoint(str(tmp_path / "plain"), tmp_path / "mxfp8", "mxfp8")
    quantised = load_target(tmp_path / "mxfp8")
    assert weight_error(load_target(tmp_path / "plain"), random_target()) == 0
    assert 0.02 < weight_error(quantised, random_target()) < 0.04
    assert weight_error(quantised, random_target(seed=5)) == pytest.approx(2**0.5, abs=0.05)


def test_a_short_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    cases = tuple(case for case in CASES if case in (("bf16", ""), ("mxfp4", ""), ("bf16", "KV")))
    monkeypatch.setattr(quantization, "CASES", cases)
    results = run("m3-tiny", None, 3, 1, 400, tmp_path / "results.json")
    plain, mxfp4, fp8 = results
    assert plain.weight_error == fp8.weight_error == 0 and plain.agreement == 1
    assert 0.08 < mxfp4.weight_error < 0.14
    assert 0.5 < mxfp4.agreement < 1 and 0.5 < fp8.agreement < 1
    assert mxfp4.megabytes < plain.megabytes == fp8.megabytes
    for result in (mxfp4, fp8):
        assert result.perplexity == pytest.approx(plain.perplexity, rel=0.15)
        assert result.perplexity != plain.perplexity
    assert [entry["weights"] for entry in json.loads((tmp_path / "results.json").read_text())] == [
        "bf16",
        "mxfp4",
        "bf16",
    ]
    assert "AL" in capsys.readouterr().out
