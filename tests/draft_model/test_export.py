"""Exports as every engine reads them. What an engine reads is written out here once more, apart from the table."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from draft_model import export as export_module
from draft_model.checkpoint import expected_shapes, load_draft, save_draft
from draft_model.config import DraftConfig
from draft_model.engines import ENGINES, flatten
from draft_model.export import Verifier, check_directory, export_draft
from draft_model.importing import read_draft
from draft_model.model import Eagle3Draft
from draft_model.weight_files import write_weights
from target_model.errors import UserError
from tests.draft_model.drafts import random_draft
from tests.draft_model.test_config import PUBLISHED
from tests.spec.test_cli import call

TARGET = Verifier("some/target", ["SomeForCausalLM"], 4096)
WRITTEN_IDS = {"hf": [1, 3, 5], "vllm": [1, 3, 5], "atom": [1, 3, 5], "speculators": [1, 3, 5], "sglang": [0, 2, 4]}
PREFIX = {
    "hf": "layers.0.",
    "vllm": "layers.0.",
    "speculators": "layers.0.",
    "sglang": "midlayer.",
    "atom": "midlayer.",
}


def written(tmp_path: Path, engine: str, draft: Eagle3Draft | None = None) -> Path:
    save_draft(draft or random_draft(), tmp_path / "source", dtype=torch.bfloat16)
    found = read_draft(tmp_path / "source", layer_ids="entering")
    export_draft(found, engine, tmp_path / engine, TARGET, "# card\n")
    return tmp_path / engine


@pytest.mark.parametrize("engine", ENGINES)
def test_names_ids_and_context(tmp_path, engine):
    directory = written(tmp_path, engine)
    config = json.loads((directory / "config.json").read_text())
    source, stored = load_file(tmp_path / "source" / "model.safetensors"), load_file(directory / "model.safetensors")
    assert stored.keys() == {name.replace("layers.0.", PREFIX[engine]) for name in source}
    for name, tensor in source.items():
        assert torch.equal(tensor, stored[name.replace("layers.0.", PREFIX[engine])]), name
    flat = config["transformer_layer_config"] if engine == "speculators" else config
    where = config if engine == "speculators" else config["eagle_config"]
    assert where["eagle_aux_hidden_state_layer_ids"] == WRITTEN_IDS[engine]
    assert flat["max_position_embeddings"] == TARGET.max_position
    assert config["draft_vocab_size"] == flat["vocab_size"] and "d2t" not in stored
    with safe_open(directory / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    assert (metadata["engine"], metadata["target"]) == (engine, "some/target")
    assert metadata["format"] == "pt"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_table_knows_every_field_and_the_export_has_every_field_it_needs(tmp_path, engine):
    config = flatten(json.loads((written(tmp_path, engine) / "config.json").read_text()))
    assert sorted(config.keys() - ENGINES[engine].fields.keys()) == []
    needed = {name for name, field in ENGINES[engine].fields.items() if field.use == "required"}
    assert sorted(needed - config.keys()) == []


def test_the_published_draft_of_minimax_m3_has_17_tensors_of_3_26_billion():
    shapes = expected_shapes(DraftConfig.from_json(PUBLISHED))
    count = {name: math.prod(shape) for name, shape in shapes.items()}
    assert len(shapes) == 17 and shapes["layers.0.self_attn.q_proj.weight"] == (8192, 12288)
    assert round(sum(count.values()) / 1e9, 2) == 3.26
    assert round((sum(count.values()) - count["embed_tokens.weight"] - count["lm_head.weight"]) / 1e9, 3) == 0.805


@pytest.mark.parametrize("engine", ["hf", "vllm", "sglang", "speculators"])
def test_a_pruned_vocabulary_brings_its_maps(tmp_path, engine):
    directory = written(tmp_path, engine, random_draft(draft_vocab_size=100))
    stored = load_file(directory / "model.safetensors")
    assert stored["d2t"].dtype == torch.int64 and stored["t2d"].dtype == torch.bool
    assert json.loads((directory / "config.json").read_text())["draft_vocab_size"] == 100
    assert check_directory(directory) == []


@pytest.mark.parametrize(
    ("engine", "overrides", "named"),
    [
        ("atom", {"draft_vocab_size": 100}, "does not read tensor d2t"),
        ("atom", {"norm_before_residual": True}, "norm_before_residual"),
        ("sglang", {"attention_bias": True}, "attention_bias"),
        ("sglang", {"norm_before_residual": True}, "norm_before_residual"),
        ("sglang", {"taps": (0, 3, 5)}, "before layer 0"),
        ("sglang", {"taps": (1, 3)}, "3 taps, not 2"),
        ("speculators", {"target_hidden_size": 32}, "own width 64, not of 32"),
        ("tensorrt", {}, "unknown engine"),
    ],
)
def test_a_draft_that_the_engine_would_misread_is_refused(tmp_path, engine, overrides, named):
    with pytest.raises(UserError, match=named):
        written(tmp_path, engine, random_draft(**overrides))
    assert not (tmp_path / engine).exists()


@pytest.mark.parametrize("engine", ["hf", "vllm", "speculators"])
def test_every_switch_survives(tmp_path, engine):
    draft = random_draft(norm_before_residual=True, attention_bias=True, num_kv_heads=2, fc_norm=False)
    directory = written(tmp_path, engine, draft)
    assert read_draft(directory).config == replace(draft.config, max_position=TARGET.max_position)


def test_a_wrong_export_is_not_left_behind(tmp_path, monkeypatch):
    def damaged(tensors, directory, metadata):
        save_file({**tensors, "norm.weight": tensors["norm.weight"] + 1}, directory / "model.safetensors", metadata)

    monkeypatch.setattr(export_module, "write_weights", damaged)
    with pytest.raises(RuntimeError, match=r"norm\.weight reads back different"):
        written(tmp_path, "vllm")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("engine", "change", "named"),
    [
        ("vllm", {"max_position_embeddings": None}, "max_position_embeddings is None, expected integer"),
        ("vllm", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
        ("vllm", {"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ("sglang", {"draft_vocab_size": None}, "draft_vocab_size is None"),
        ("sglang", {"norm_before_residual": True}, "norm_before_residual is true, but the engine does not read it"),
        ("atom", {"hidden_act": "gelu"}, "hidden_act"),
        ("speculators", {"norm_before_fc": True}, "norm_before_fc"),
        ("speculators", {"speculators_config": {}}, "speculators_config.verifier.name_or_path is missing"),
    ],
)
def test_check_names_the_field(tmp_path, engine, change, named):
    directory = written(tmp_path, engine)
    assert check_directory(directory) == []
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert named in "\n".join(check_directory(directory))


@pytest.mark.parametrize(
    ("engine", "other", "named"),
    [
        ("sglang", "vllm", "written as output for sglang, vllm takes them as entering"),
        ("vllm", "speculators", "speculators_model_type is missing"),
        ("sglang", "speculators", "tensor midlayer.hidden_norm.weight is not read"),
    ],
)
def test_an_export_for_one_engine_is_not_one_for_another(tmp_path, engine, other, named):
    assert named in "\n".join(check_directory(written(tmp_path, engine), other))


def test_other_layer_ids_are_not_taken_for_our_own(tmp_path):
    """The draft would run, on the wrong layers."""
    with pytest.raises(UserError, match="layer ids mean outputs"):
        load_draft(written(tmp_path, "sglang"))
    assert load_draft(written(tmp_path, "atom")).config.taps == (1, 3, 5)


def test_tied_tensors_are_written(tmp_path):
    tied = torch.arange(6.0).view(2, 3)
    write_weights({"a": tied, "b": tied, "c": tied.T}, tmp_path, {})
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["a"], stored["b"]) and torch.equal(stored["c"], tied.T)


def test_check_names_tensors(tmp_path):
    directory = written(tmp_path, "vllm")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["layers.0.mlp.gate_proj.weight"] = tensors["layers.0.mlp.gate_proj.weight"].float()
    save_file(tensors, path)
    assert any("several dtypes" in problem for problem in check_directory(directory, "vllm"))
    del tensors["lm_head.weight"]
    save_file(tensors, path)
    assert any("lm_head.weight is missing" in problem for problem in check_directory(directory, "vllm"))


def run_folder(tmp_path: Path) -> Path:
    bundled = Path("draft_model/bundled/m3-tiny-eagle3")
    shutil.copytree(bundled, tmp_path / "run" / "draft", ignore=shutil.ignore_patterns("README.md"))
    best = {"al": 2.25, "al_sampled": 1.5, "chain": 3, "prompts": 6, "per_position": [0.7, 0.5, 0.25]}
    record = {"name": "mine", "target": "m3-tiny", "step": 5, "total_steps": 9, "complete": False, "best": best}
    (tmp_path / "run" / "run.json").write_text(json.dumps(record | {"config": {"optimizer": {"lr": 0.125}}}))
    return tmp_path / "run"


def test_command_and_card(tmp_path, monkeypatch, capsys):
    output = tmp_path / "out"
    arguments = ("export", str(run_folder(tmp_path)), "--to", "sglang", "--output", str(output))
    code, out, _ = call(monkeypatch, capsys, *arguments)
    assert code == 0 and "17 tensors for sglang, read back equal; context 4096" in out
    card = (output / "README.md").read_text()
    for part in ("| greedy | 2.25 |", "0.700, 0.500, 0.250", '"lr": 0.125', "step 5 of 9", "[1, 3, 4]", "m3-tiny"):
        assert part in card, part
    assert call(monkeypatch, capsys, *arguments)[0] == 2
    code, out, _ = call(monkeypatch, capsys, "export", "--check", str(output))
    assert code == 0 and "as its engine reads them" in out
    code, out, _ = call(monkeypatch, capsys, "export", "--check", str(output), "--to", "vllm")
    assert code == 1 and "vllm takes them as entering" in out


def test_a_run_by_its_name(tmp_path, monkeypatch, capsys):
    run = run_folder(tmp_path)
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, capsys, "export", "mine", "--to", "hf", "--output", "out")[0] == 0


def test_a_record_that_is_none(tmp_path, monkeypatch, capsys):
    run = run_folder(tmp_path)
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"best": 5}))
    code, _, error = call(monkeypatch, capsys, "export", str(run), "--to", "hf", "--output", str(tmp_path / "out"))
    assert code == 2 and error.startswith(f"spec: {run / 'run.json'} is not the record of a training run")


@pytest.mark.parametrize("recorded", [True, False])
def test_a_run_that_has_no_draft_yet(tmp_path, monkeypatch, capsys, recorded):
    run = run_folder(tmp_path)
    shutil.rmtree(run / "draft")
    if not recorded:
        (run / "run.json").rename(run / "state")
    code, _, error = call(monkeypatch, capsys, "export", str(run), "--to", "hf", "--output", str(tmp_path / "out"))
    assert (code, error) == (2, f"spec: run {run} has written no draft yet\n")


@pytest.mark.parametrize(
    "fault",
    [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device (os error 28)")],
)
def test_a_full_disk_is_named(tmp_path, monkeypatch, capsys, fault):
    def full(*_, **__):
        raise fault

    monkeypatch.setattr("draft_model.weight_files.save_file", full)
    output = tmp_path / "out"
    arguments = ("export", "eagle3", "--target", "m3-tiny", "--to", "hf", "--output", str(output))
    code, _, error = call(monkeypatch, capsys, *arguments)
    assert (code, error) == (2, f"spec: the disk is full ({output})\n") and not any(tmp_path.iterdir())


def test_the_bundled_draft_keeps_its_acceptance_and_recipe(tmp_path, monkeypatch, capsys):
    output = str(tmp_path / "out")
    code, _, _ = call(
        monkeypatch, capsys, "export", "eagle3", "--target", "m3-tiny", "--to", "vllm", "--output", output
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert code == 0 and "| chain of 3, greedy |" in card and "## Recipe" in card


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--to", "vllm", "--output", "x"], "DRAFT is missing"),
        (["nowhere", "--to", "vllm", "--output", "x"], "nowhere is neither"),
        (["draft_model/bundled/m3-tiny-eagle3", "--to", "nope", "--output", "x"], "unknown engine 'nope'"),
        (["eagle3", "--to", "vllm", "--output", "x"], "needs --target"),
        (["eagle3", "--check", "x"], "--check takes a directory alone"),
    ],
)
def test_mistakes_are_named(monkeypatch, capsys, arguments, named):
    code, _, error = call(monkeypatch, capsys, "export", *arguments)
    assert code == 2 and named in error
