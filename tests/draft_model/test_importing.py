"""Drafts of other trainers: the golden ones compute what their independent script says; others are refused by name."""

import json
import runpy
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from draft_model.checkpoint import load_draft, save_draft
from draft_model.export import Verifier, export_draft
from draft_model.importing import TargetParts, describe, read_draft
from draft_model.model import Eagle3Draft
from target_model.errors import UserError
from tests.draft_model.drafts import random_draft
from tests.spec.test_cli import call

GOLDEN = Path(__file__).parent / "golden"
# The directory -> what has to be said beside it.
ARGUMENTS = {
    "published": {"layer_ids": "entering"},
    "vllm-gqa": {"layer_ids": "entering"},
    "specforge": {"layer_ids": "output"},
    "torchspec": {"layer_ids": "entering"},
    "speculators": {},
    "eagle": {},
}


def parts(name: str) -> TargetParts:
    """A target of 8 layers whose embedding the draft was made with."""
    return TargetParts((2, 4, 5), 512, load_file(GOLDEN / name / "expected.safetensors")["embedding"])


def golden(name: str):
    return read_draft(GOLDEN / name, target=parts(name), **ARGUMENTS[name])


@torch.no_grad()
def logits(draft: Eagle3Draft, aux: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of the rows of `aux`, and of one drafted row behind them."""

    def attend(q, k, v):
        groups = q.shape[1] // k.shape[1]
        q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)

    rows = len(aux)
    q, k, v, residual = draft.attention_inputs(tokens[:rows], draft.project(aux), torch.arange(rows) + 1)
    state = draft.attention_output(attend(q, k, v), residual)
    fed = draft.next_feature(state[-1:])
    q1, k1, v1, residual = draft.attention_inputs(tokens[rows:], fed, torch.tensor([rows + 1]))
    drafted = draft.attention_output(attend(q1, torch.cat([k, k1]), torch.cat([v, v1])), residual)
    return draft.logits(torch.cat([state, drafted]))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_golden_drafts_compute_what_the_script_says(tmp_path, name):
    expected = load_file(GOLDEN / name / "expected.safetensors")
    imported = golden(name)
    assert imported.config.taps == (2, 4, 5)
    export_draft(imported, "hf", tmp_path / "draft", Verifier(None, [], 512), "# card\n")
    draft = load_draft(tmp_path / "draft")
    torch.testing.assert_close(logits(draft, expected["aux"], expected["tokens"]), expected["logits"])
    ids = draft.target_ids(torch.arange(len(expected["target_ids"])))
    assert torch.equal(ids, expected["target_ids"])


@pytest.mark.parametrize(("seed", "name"), list(enumerate(ARGUMENTS)))
def test_the_script_makes_these_files(tmp_path, seed, name):
    runpy.run_path(str(GOLDEN / "make.py"))["write"](tmp_path, name, seed)
    for path in (GOLDEN / name).iterdir():
        if path.suffix == ".safetensors":
            made, kept = load_file(tmp_path / name / path.name), load_file(path)
            assert made.keys() == kept.keys()
            for key, tensor in kept.items():
                # The logits went through another machine's arithmetic.
                torch.testing.assert_close(made[key], tensor)
        elif path.suffix == ".json":
            assert path.read_text() == (tmp_path / name / path.name).read_text()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("published", ["LlamaForCausalLMEagle3", "MHA", "full vocabulary", "fc_norm, norm_output", "layers.0.*"]),
        ("vllm-gqa", ["GQA with 2", "norm_before_residual, attention_bias"]),
        ("specforge", ["12 of 40", "midlayer.*", "[1, 3, 4] read as output", "embed_tokens.weight is not there"]),
        ("torchspec", ["TorchSpec", "switches on: norm_output;"]),
        ("speculators", ["speculators", "fc_norm, norm_before_residual", "[2, 4, 5] read as entering"]),
        ("eagle", ["EAGLE", "rope_theta 10000", "no layer ids"]),
    ],
)
def test_what_was_found_is_said(name, said):
    text = "\n".join(describe(golden(name)))
    assert [part for part in said if part not in text] == []


@pytest.mark.parametrize("name", ["published", "specforge", "torchspec", "vllm-gqa"])
def test_ambiguous_layer_ids_have_to_be_explained(name):
    with pytest.raises(UserError, match="--layer-ids entering or --layer-ids output"):
        read_draft(GOLDEN / name, target=parts(name))


def test_leaving_layer_k_is_entering_the_next():
    assert read_draft(GOLDEN / "published", layer_ids="output").config.taps == (3, 5, 6)


def copy(name: str, to: Path) -> Path:
    shutil.copytree(GOLDEN / name, to, ignore=shutil.ignore_patterns("expected*"))
    return to


def change_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("name", "tensors", "config", "named"),
    [
        ("published", {"input_norm.weight": (48,)}, {}, r"input_norm\.weight is not supported: one norm over all taps"),
        ("published", {"layers.0.self_attn.q_norm.weight": (4,)}, {}, "q_norm.weight is not supported: a norm of the"),
        ("published", {"layers.1.input_layernorm.weight": (16,)}, {}, "layers.1.* a second layer"),
        ("published", {"fc.bias": (16,)}, {}, "fc.bias is not supported: a bias behind fc"),
        ("published", {"midlayer.hidden_norm.weight": (16,)}, {}, "hidden_norm.weight is there twice"),
        ("published", {"fc.weight": (16, 32)}, {}, r"fc.weight has shape \[16, 32\], expected \[16, 48\]"),
        ("published", {"fc_norm.1.weight": None}, {}, "fc_norm.1.weight is missing"),
        ("published", {"embed_tokens.weight": None}, {}, "embed_tokens.weight is missing: name the target"),
        ("published", {"d2t": (40,)}, {}, "d2t maps ids, but the draft has the full vocabulary"),
        ("published", {}, {"norm_before_fc": True}, "input_norm.weight"),
        ("published", {}, {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling"),
        ("published", {}, {"num_hidden_layers": 2}, "num_hidden_layers"),
        ("published", {}, {"fc_norm": False}, "fc_norm.0.weight is not supported"),
        ("published", {}, {"attention_bias": True}, "q_proj.bias is missing"),
        ("published", {}, {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ("published", {}, {"eagle_config": None}, "names no layer ids"),
        ("speculators", {"d2t": None}, {}, "d2t is missing"),
        ("speculators", {}, {"speculators_model_type": "dflash"}, "dflash"),
    ],
)
def test_what_cannot_be_represented_is_named(tmp_path, name, tensors, config, named):
    directory = copy(name, tmp_path / "draft")
    stored = load_file(directory / "model.safetensors")
    for tensor, shape in tensors.items():
        stored.pop(tensor, None)
        if shape is not None:
            stored[tensor] = torch.ones(shape, dtype=torch.int64 if tensor == "d2t" else torch.bfloat16)
    save_file(stored, directory / "model.safetensors")
    change_config(directory, **config)
    with pytest.raises(UserError, match=named):
        read_draft(directory, layer_ids="entering")


def test_a_target_is_no_draft():
    with pytest.raises(UserError, match="bundled/m3-tiny holds no EAGLE-3 draft"):
        read_draft(Path("target_model/bundled/m3-tiny"))


def test_speculators_and_vllm_disagree_about_an_absent_switch(tmp_path):
    directory = copy("speculators", tmp_path / "draft")
    path = directory / "config.json"
    source = json.loads(path.read_text())
    del source["norm_before_residual"]
    path.write_text(json.dumps(source))
    with pytest.raises(UserError, match="--no-norm-before-residual"):
        read_draft(directory)
    assert read_draft(directory, norm_before_residual=False).config.norm_before_residual is False


def test_sizes_that_a_config_leaves_out_follow_from_the_tensors(tmp_path):
    draft = random_draft(head_dim=32, target_hidden_size=48, draft_vocab_size=100)
    save_draft(draft, tmp_path / "draft")
    path = tmp_path / "draft" / "config.json"
    dropped = ("head_dim", "target_hidden_size", "draft_vocab_size", "fc_norm")
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in dropped}))
    assert read_draft(tmp_path / "draft", layer_ids="entering").config == draft.config


def test_a_missing_t2d_follows_from_d2t(tmp_path):
    directory = copy("speculators", tmp_path / "draft")
    stored = load_file(directory / "model.safetensors")
    marks = stored.pop("t2d")
    save_file(stored, directory / "model.safetensors")
    assert torch.equal(read_draft(directory).tensors["t2d"], marks)


def test_wrappers_and_copies_of_the_target_are_stripped(tmp_path):
    directory = copy("speculators", tmp_path / "draft")
    stored = {f"draft_model.{name}": tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    stored["verifier_norm.weight"] = torch.ones(16)
    save_file(stored, directory / "model.safetensors")
    assert read_draft(directory).tensors.keys() == golden("speculators").tensors.keys()


def test_pickled_code_is_not_run(tmp_path):
    directory = copy("eagle", tmp_path / "draft")
    torch.save({"fc.weight": torch.nn.Linear(2, 2)}, directory / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is damaged or holds more than tensors"):
        read_draft(directory, target=parts("eagle"))


def test_command(tmp_path, monkeypatch, capsys):
    arguments = ("import", str(GOLDEN / "published"), "--output", str(tmp_path / "draft"))
    code, _, error = call(monkeypatch, capsys, *arguments)
    assert code == 2 and "--layer-ids" in error and not (tmp_path / "draft").exists()
    code, out, _ = call(monkeypatch, capsys, *arguments, "--layer-ids", "entering")
    assert code == 0 and "switches on: fc_norm, norm_output" in out and "taps [2, 4, 5]" in out
    assert load_draft(tmp_path / "draft").config.norm_output
    code, _, error = call(monkeypatch, capsys, *arguments, "--layer-ids", "entering")
    assert code == 2 and "exists" in error


def test_the_command_takes_a_missing_embedding_from_the_target(tmp_path, monkeypatch, capsys):
    bundled = Path("draft_model/bundled/m3-tiny-eagle3")
    shutil.copytree(bundled, tmp_path / "bare")
    stored = load_file(bundled / "model.safetensors")
    embedding = stored.pop("embed_tokens.weight")
    save_file(stored, tmp_path / "bare" / "model.safetensors")
    arguments = ("import", str(tmp_path / "bare"), "--output", str(tmp_path / "draft"), "--layer-ids", "entering")
    code, _, error = call(monkeypatch, capsys, *arguments)
    assert code == 2 and "embed_tokens.weight is missing" in error
    code, out, _ = call(monkeypatch, capsys, *arguments, "--target", "m3-tiny")
    assert code == 0 and "the target's is taken" in out
    back = load_file(tmp_path / "draft" / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(back, embedding)
