"""WEIGHTS: a checkpoint is incomplete or its vocabulary map wrong, and nothing complains.

Report R8 (weights skipped on export, re-created at random, loaded without a word). Also tried, of the same kind: a
pruned draft, a map that is off by one. Every kind of damage to a draft file against the loader itself is in
tests/draft_model/test_checkpoint.py, to a target's in tests/target_model/test_checkpoint.py; here the server starts.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_model.checkpoint import load_draft
from serve.load import EngineOptions, load_engine
from target_model.checkpoint import load_target
from target_model.errors import UserError
from train.config import parse_config
from train.loop import train
from train.replay import replay


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A pruned draft after 5 steps: the module that the judge saw, and the run."""
    directory, seen = tmp_path_factory.mktemp("weights"), []
    (directory / "rows.jsonl").write_text(json.dumps({"text": "for i in range(9):\n    print(i)\n" * 2}) + "\n")
    config = parse_config(
        {
            "name": "five",
            "output": str(directory),
            "data": {"path": str(directory / "rows.jsonl"), "sequence_length": 48},
            "draft": {"intermediate_size": 64, "draft_vocab_size": 512},
            "ttt": {"steps": 2},
            "schedule": {"steps": 5},
            "engine": {"device": "cpu", "dtype": "float32", "micro_batch": 1},
        }
    )

    def judge(draft, target):
        seen.append(draft)
        return {"al": 1.0}

    return seen, train(config, judge=judge, progress=False)


def test_r8_the_export_is_what_was_trained(trained):
    (judged,), result = trained
    stored = load_file(result.draft / "model.safetensors")
    assert {value.dtype for value in stored.values() if value.is_floating_point()} == {torch.bfloat16}
    loaded, target = load_draft(result.draft), load_target("m3-tiny")
    for name, value in judged.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    assert torch.equal(loaded.embed_tokens.weight, target.embed_tokens.weight.bfloat16().float())
    text = list(range(40, 90))

    def capture(ids):
        return *target.capture(ids, loaded.config.taps), None

    ends, texts = target.config.eos_token_ids, [(text[:20], text[20:])]
    assert replay(judged, capture, ends, texts, 3) == replay(loaded, capture, ends, texts, 3)


def _shift(tensors):
    tensors["d2t"] = tensors["d2t"] + 1


DAMAGES = {
    "layers.0.mlp.gate.weight|layers.0.mlp.gate_proj.weight": lambda t: t.__setitem__(
        "layers.0.mlp.gate.weight", t.pop("layers.0.mlp.gate_proj.weight")
    ),
    "lm_head.weight is missing": lambda t: t.pop("lm_head.weight"),
    "embed_tokens.weight is missing": lambda t: t.pop("embed_tokens.weight"),
    "layers.0.self_attn.o_proj.weight is missing": lambda t: t.pop("layers.0.self_attn.o_proj.weight"),
    "fc.weight has shape": lambda t: t.__setitem__("fc.weight", t["fc.weight"][:, :-1].contiguous()),
    "d2t": _shift,
}


@pytest.mark.parametrize("named", DAMAGES)
def test_r8_the_server_does_not_start_on_a_damaged_draft(trained, tmp_path, named):
    draft = tmp_path / "draft"
    draft.mkdir()
    tensors = load_file(trained[1].draft / "model.safetensors")
    DAMAGES[named](tensors)
    save_file(tensors, draft / "model.safetensors")
    (draft / "config.json").write_bytes((trained[1].draft / "config.json").read_bytes())
    with pytest.raises(UserError, match=named):
        load_engine(EngineOptions("m3-tiny", str(draft), device="cpu", pages=8))


def test_r8_a_truncated_draft(trained, tmp_path):
    (tmp_path / "config.json").write_bytes((trained[1].draft / "config.json").read_bytes())
    whole = (trained[1].draft / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        load_engine(EngineOptions("m3-tiny", str(tmp_path), device="cpu", pages=8))
