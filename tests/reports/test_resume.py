"""RESUME: a restart does not continue the same run.

Reports R12 (schedule back in warm-up, moments lost, a mid-run evaluation that leaves its mark) and R20 (frozen
parameters missing in the checkpoint). Also tried, of the same kind: accumulation 1 and 3, a cut inside warm-up, packed
rows, a pruned vocabulary, another seed of the process and of the fresh draft, training from a store, fp32 and bf16.
20 = 10 + 10 = 7 + 13 bit for bit is in tests/train/test_loop.py, two processes at every stage in
tests/train/test_processes.py. The draft has no dropout.
"""

import json

import pytest
import torch

from draft_model.checkpoint import load_draft
from target_model.checkpoint import load_target
from train import loop
from train.capture import capture_store
from train.config import parse_config
from train.initialise import new_draft
from train.loop import train


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "rows.jsonl"
    texts = [f"v{i} = [{i}]\nprint(v{i})\n" * (1 + i % 3) for i in range(12)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def make(name, **sections):
        values = {
            "name": name,
            "output": str(tmp_path / "runs"),
            "data": {"path": str(path), "sequence_length": 40, "packing": True},
            "draft": {"intermediate_size": 64, "draft_vocab_size": 512, "train_head": False},
            "ttt": {"steps": 2},
            "optimizer": {"lr": 1e-3},
            "schedule": {"steps": 8, "warmup": 0.5},
            "engine": {"device": "cpu", "dtype": "float32", "micro_batch": 1, "threads": 1},
            "checkpoint": {"export_dtype": "float32"},
            "log": {"every": 1},
        }
        return parse_config(values | {key: values.get(key, {}) | fields for key, fields in sections.items()})

    return make


def curve(result):
    lines = [json.loads(line) for line in (result.directory / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line["lr"], line["loss"]) for line in lines if "loss" in line]


def assert_same(first, second):
    assert curve(first) == curve(second) and first.step == second.step == 8
    ours, theirs = load_draft(first.draft).state_dict(), load_draft(second.draft).state_dict()
    assert ours.keys() == theirs.keys() and "d2t" in ours
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize(
    ("stage", "dtype", "accumulate"), [(0, "float32", 1), (1, "float32", 3), (2, "float32", 1), (2, "bfloat16", 3)]
)
def test_r12_r20_two_parts_are_the_whole(settings, monkeypatch, stage, dtype, accumulate):
    """Cut inside warm-up; the second process starts from another fresh draft and map, of which nothing may remain."""
    engine = {"zero_stage": stage, "dtype": dtype, "accumulate": accumulate}
    straight = train(settings("straight", engine=engine), progress=False)
    rates = [rate for _, rate, _ in curve(straight)]
    assert rates[:4] == sorted(rates[:4]) and rates[4:] == sorted(rates[4:], reverse=True) and len(set(rates)) == 6
    config = settings("cut", engine=engine)
    train(config, progress=False, stop=(3).__eq__)

    def from_another_seed(draft_settings, target, rows, seed):
        draft = new_draft(draft_settings, target, rows, seed + 1)
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter.add_(1.0)  # frozen ones too: a checkpoint without them would leave this
            draft.d2t.copy_(torch.arange(len(draft.d2t)).flip(0) - torch.arange(len(draft.d2t)))
        return draft

    monkeypatch.setattr(loop, "new_draft", from_another_seed)
    torch.manual_seed(123)
    assert_same(straight, train(config, progress=False))


def test_r20_the_checkpoint_holds_the_frozen_draft_but_not_the_target(settings):
    result = train(settings("frozen", schedule={"steps": 2}), progress=False)
    (saved,) = (result.directory / "state").glob("*/*model_states.pt")
    state = torch.load(saved, weights_only=False)["module"]
    target = load_target("m3-tiny")
    assert torch.equal(state["draft.embed_tokens.weight"], target.embed_tokens.weight)
    loaded = load_draft(result.draft).state_dict()
    assert {name.removeprefix("draft.") for name in state} == loaded.keys()
    size = sum(value.numel() * value.element_size() for value in state.values())
    optimizer = 8 * sum(
        loaded[name].numel() for name in loaded if name not in ("embed_tokens.weight", "lm_head.weight")
    )
    assert saved.stat().st_size < 1.1 * (size + optimizer)


def test_r12_a_judgement_in_the_middle_changes_nothing(settings):
    """Neither the mode of the draft, nor its weights, nor the random numbers that follow."""
    modes = []

    def judge(draft, target):
        modes.append((draft.training, any(p.requires_grad for p in draft.parameters())))
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter.zero_()
        return {"al": 1.0}

    judged = train(settings("judged", eval={"every": 2}), judge=judge, progress=False)
    plain = train(settings("plain"), progress=False)
    assert modes == [(False, False)] * 4 and curve(judged) == curve(plain)


def test_r12_a_run_from_a_store_resumes_too(settings, tmp_path):
    store = str(tmp_path / "store")
    capture_store(settings("x"), store, dtype="fp8", note=lambda _: None)
    features = {"store": store}
    straight = train(settings("straight", features=features), progress=False)
    config = settings("cut", features=features)
    train(config, progress=False, stop=(5).__eq__)
    assert_same(straight, train(config, progress=False))
