"""Strict checkpoints: what is written is read back, and every damage stops the loader with the tensor's name."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_model.checkpoint import check_draft, load_draft, save_draft
from draft_model.importing import read_draft
from target_model.errors import UserError
from tests.draft_model.drafts import random_draft

VARIANTS = [
    {},
    {"fc_norm": False, "norm_output": False, "norm_before_residual": True},
    {"attention_bias": True, "num_kv_heads": 2},
    {"draft_vocab_size": 100},
]


@pytest.mark.parametrize("overrides", VARIANTS)
def test_round_trip_is_exact(tmp_path, overrides):
    draft = random_draft(**overrides)
    save_draft(draft, tmp_path / "draft", {"note": 1})
    loaded = load_draft(tmp_path / "draft")
    assert loaded.config == draft.config
    ours, theirs = draft.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert json.loads((tmp_path / "draft" / "training.json").read_text()) == {"note": 1}


def test_published_names_and_dtype(tmp_path):
    save_draft(random_draft(), tmp_path / "draft", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert sorted(stored) == sorted(
        ["embed_tokens.weight", "fc.weight", "fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"]
        + [f"layers.0.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
        + [f"layers.0.self_attn.{n}_proj.weight" for n in "qkvo"]
        + [f"layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
        + ["lm_head.weight", "norm.weight"]
    )  # fmt: skip
    assert len(stored) == 17
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert stored["layers.0.self_attn.q_proj.weight"].shape == (64, 128)


def test_pruned_map_as_published(tmp_path):
    draft = random_draft(draft_vocab_size=100)
    save_draft(draft, tmp_path / "draft", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    ids = stored["d2t"] + torch.arange(100)
    assert stored["d2t"].dtype == torch.int64 and stored["t2d"].dtype == torch.bool
    assert torch.equal(stored["t2d"].nonzero()[:, 0], ids)
    assert torch.equal(draft.target_ids(torch.arange(100)), ids)


def test_midlayer_prefix_is_read(tmp_path):
    draft = random_draft()
    save_draft(draft, tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name.replace("layers.0.", "midlayer."): t for name, t in load_file(path).items()}, path)
    assert torch.equal(load_draft(tmp_path).qkv_proj.weight, draft.qkv_proj.weight)


def _drop(name):
    return lambda tensors: tensors.pop(name)


def _rename(tensors):
    tensors["layers.0.mlp.gate.weight"] = tensors.pop("layers.0.mlp.gate_proj.weight")


def _add(tensors):
    tensors["layers.1.input_layernorm.weight"] = torch.ones(64)


def _whole(tensors):
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.int64)


def _reshape(tensors):
    tensors["layers.0.self_attn.k_proj.weight"] = torch.zeros(32, 128)


def _twice(tensors):
    tensors["midlayer.input_layernorm.weight"] = torch.ones(64)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_drop("lm_head.weight"), "lm_head.weight is missing"),
        (_drop("embed_tokens.weight"), "embed_tokens.weight is missing"),
        (_drop("fc_norm.1.weight"), "fc_norm.1.weight is missing"),
        (_rename, "layers.0.mlp.gate_proj.weight is missing"),
        (_add, "unknown tensor layers.1.input_layernorm.weight"),
        (_reshape, r"layers.0.self_attn.k_proj.weight has shape \[32, 128\], expected \[64, 128\]"),
        (_whole, "fc.weight is of another kind: expected floating-point numbers"),
        (_twice, "twice"),
    ],
)
def test_damage_is_named(tmp_path, damage, named):
    save_draft(random_draft(), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path)
    for load in (load_draft, check_draft):
        with pytest.raises(UserError, match=named):
            load(tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["fc.weight", "layers.0.self_attn.k_proj.weight", "norm.weight"])
def test_a_weight_that_is_not_finite_is_named(tmp_path, name, value):
    save_draft(random_draft(), tmp_path, dtype=torch.bfloat16)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, path)
    with pytest.raises(UserError, match=rf"tensor {re.escape(name)} holds NaN or infinite values \(read as float32\)"):
        load_draft(tmp_path)
    with pytest.raises(UserError, match=rf"tensor {re.escape(name)} holds NaN or infinite values"):
        read_draft(tmp_path, layer_ids="entering")


def test_a_weight_that_the_type_cannot_hold_is_named(tmp_path):
    draft = random_draft()
    draft.fc.weight.data[0, 0] = 1e30
    save_draft(draft, tmp_path)
    assert load_draft(tmp_path, torch.bfloat16).fc.weight.isfinite().all()
    with pytest.raises(UserError, match=r"tensor fc\.weight holds NaN or infinite values \(read as float16\)"):
        load_draft(tmp_path, torch.float16)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_drop("d2t"), "d2t is missing"),
        (_drop("t2d"), "t2d is missing"),
        (lambda tensors: tensors["d2t"].zero_(), "disagree"),
        (lambda tensors: tensors["d2t"].add_(250), "distinct ids below 300"),
    ],
)
def test_a_wrong_vocabulary_map_is_refused(tmp_path, damage, named):
    save_draft(random_draft(draft_vocab_size=100), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path)
    for load in (load_draft, check_draft):
        with pytest.raises(UserError, match=named):
            load(tmp_path)


def test_truncated_missing_or_foreign_files(tmp_path):
    save_draft(random_draft(), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        load_draft(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        load_draft(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        load_draft(tmp_path / "nowhere")


def test_a_failed_save_leaves_the_old_draft(tmp_path, monkeypatch):
    draft = random_draft()
    save_draft(draft, tmp_path / "draft")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("draft_model.checkpoint.save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_draft(random_draft(seed=1), tmp_path / "draft")
    assert torch.equal(load_draft(tmp_path / "draft").fc.weight, draft.fc.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
