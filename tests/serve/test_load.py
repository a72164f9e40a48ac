"""From names to an engine, and what is refused on the way."""

import json
import re
from dataclasses import replace

import pytest
import torch

from draft_model.checkpoint import save_draft
from serve import warm_up
from serve.description import SamplingDefaults, usable_context
from serve.load import EngineOptions, load_engine
from serve.padded_passes import ROWS
from serve.request import SamplingParams
from serve.tree import TreeConfig
from target_model.errors import UserError
from target_model.resolve import BUNDLED
from tests.fixtures import random_target
from tests.serve.drafts import random_draft


@pytest.fixture(scope="module")
def tiny():
    return load_engine(EngineOptions(draft=None, device="cpu", pages=40))


def test_the_description_says_what_was_chosen(tiny):
    engine, tokenizer, description = tiny
    assert description.target == "m3-tiny"
    assert description.defaults == SamplingDefaults(temperature=1.0, top_p=0.95, top_k=40)
    text = "\n".join(description.lines)
    assert "no draft: plain decoding" in text
    # 8 layers of K and V of 2 x 32 in fp32, and 5 of index K.
    assert f"640 tokens of {(8 * 2 * 64 * 4 + 5 * 32 * 4) / 1024:.2f} KiB" in text
    assert "target 23.02 MiB" in text
    assert usable_context(engine) == 638
    prompt = tokenizer.encode("x")
    assert len(engine.generate([prompt * 600], SamplingParams(max_tokens=38, ignore_eos=True))[0].token_ids) == 38


@pytest.mark.parametrize(("sampling", "asked", "measured"),
                         [("coupled", None, None), ("coupled", False, False), ("rejection", None, False)])  # fmt: skip
def test_costs_are_measured_of_the_steps_that_are_made(monkeypatch, sampling, asked, measured):
    given = []
    monkeypatch.setattr("serve.load.measure_costs", lambda target, draft, **options: given.append(options))
    load_engine(EngineOptions(device="cpu", pages=40, context=300, adaptive=True, sampling=sampling, device_step=asked))
    assert given == [{"max_running": 32, "context": 300, "device_step": measured}]


def test_a_draft_from_a_directory(tiny, tmp_path):
    target = tiny[0].runner.target
    save_draft(random_draft(target), tmp_path / "draft")
    tree = TreeConfig(3, 2, 6)
    engine, tokenizer, description = load_engine(
        EngineOptions(draft=str(tmp_path / "draft"), tree=tree, device="cpu", pages=40)
    )
    assert description.draft == str(tmp_path / "draft")
    assert any("the directory that was named" in line for line in description.lines)
    assert f"speculation: {tree}" in description.lines
    prompts = [tokenizer.encode("def add(a, b):")]
    params = SamplingParams(temperature=0, max_tokens=20)
    assert engine.generate(prompts, params)[0].token_ids == tiny[0].generate(prompts, params)[0].token_ids


def test_a_draft_of_another_target_is_refused(tmp_path):
    save_draft(random_draft(random_target()), tmp_path / "draft")
    with pytest.raises(UserError, match="its target_hidden_size is 64, but the target has 192"):
        load_engine(EngineOptions(draft=str(tmp_path / "draft"), device="cpu"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "nowhere"}, "unknown target 'nowhere'"),
        ({"draft": "nowhere"}, "draft nowhere is neither"),
    ],
)
def test_unknown_names(options, message):
    with pytest.raises(UserError, match=message):
        load_engine(EngineOptions(**{"draft": None, **options}, device="cpu"))


def test_a_checkpoint_that_does_not_sample(tmp_path):
    for file in (BUNDLED / "m3-tiny").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": 2}))
    _, tokenizer, description = load_engine(
        EngineOptions(str(tmp_path), draft=None, device="cpu", dtype=torch.float32, pages=8)
    )
    assert description.defaults == SamplingDefaults(temperature=0.0)
    assert tokenizer.eos_ids == (2,)


def test_a_warm_engine_has_forgotten(tiny):
    """Prompts of all padded sizes have been read, and nothing is left of them."""
    options = EngineOptions(context=1024, pages=200, device="cpu", device_step=True)
    warm, _, _ = load_engine(replace(options, warm_up=True))
    fresh, _, _ = load_engine(options)
    assert {size.rows for size in warm.runner.prompt_passes.passes.rows} == set(ROWS)
    assert {size.sequences for size in warm.runner.prompt_passes.passes.rows} == {1, 2, 8}
    assert warm.stats() == fresh.stats()
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=10)
    prompt = [1] * 60  # what a size was tried with
    assert warm.generate([prompt], params) == fresh.generate([prompt], params)
    assert warm.stats()["pages_cached"] == fresh.stats()["pages_cached"] > 0


def test_who_waits_long_is_told_why(monkeypatch, capsys):
    options = EngineOptions(draft=None, pages=3, device="cpu", device_step=True, warm_up=True)
    load_engine(options)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(warm_up, "LONG", 0.0)
    load_engine(options)
    out, err = capsys.readouterr()
    assert not out and re.fullmatch(r"compiled kernels and captured graphs in \d+\.\d s\n", err)


@pytest.mark.parametrize(("pages", "read"), [(1, set()), (3, {16, 32})])
def test_a_small_cache_is_warmed_as_far_as_it_goes(pages, read):
    options = EngineOptions(draft=None, pages=pages, device="cpu", device_step=True, warm_up=True)
    engine, _, _ = load_engine(options)
    assert {size.rows for size in engine.runner.prompt_passes.passes.rows} == read
