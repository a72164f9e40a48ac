"""Configuration mistakes are one line that names the key; recipes are valid; the plan tells sizes."""

import contextlib

import pytest

from draft_model.checkpoint import save_draft
from target_model.errors import UserError
from target_model.resolve import resolve_config
from tests.draft_model.drafts import random_draft
from train.config import load_config, parse_config
from train.initialise import run_draft_config
from train.plan import plan

BASE = "name: x\ndata: {path: rows.jsonl}\nschedule: {steps: 3}\n"


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE)
    return path


def test_overrides(recipe):
    config = load_config(recipe, ["optimizer.lr=3e-4", "data.packing=true", "draft.taps=[1, 2]", "ttt.steps=5"])
    assert config.optimizer.lr == 3e-4 and config.data.packing and config.draft.taps == [1, 2] and config.ttt.steps == 5
    assert load_config(recipe, ["schedule.steps=null", "schedule.epochs=2"]).schedule.epochs == 2
    schedule = load_config(recipe, ["schedule.epochs=2"]).schedule
    assert (schedule.steps, schedule.epochs) == (None, 2)
    with pytest.raises(UserError, match="with overrides: schedule: give exactly one of steps, epochs, tokens"):
        load_config(recipe, ["schedule.epochs=2", "schedule.tokens=9000"])
    with pytest.raises(UserError, match="override seed is given twice"):
        load_config(recipe, ["seed=1", "seed=2"])


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("optimiser.lr=1", r"unknown key optimiser \(did you mean optimizer\?\)"),
        ("optimizer.learning_rate=1", "unknown key optimizer.learning_rate"),
        ("optimizer.lr=fast", "optimizer.lr: input should be a valid number, not 'fast'"),
        ("optimizer.lr=true", "optimizer.lr"),
        ("optimizer.lr=-1", "optimizer.lr: input should be greater than 0, not -1"),
        ("ttt.steps=2.5", "ttt.steps"),
        ("ttt.steps='3'", "ttt.steps"),
        ("engine.zero_stage=4", "engine.zero_stage"),
        ("engine.device=tpu", "engine.device"),
        ("schedule.steps=null", "schedule: give exactly one of steps, epochs, tokens"),
        ("name=a/b", "name"),
        ("data.path=3", "data.path"),
        ("ttt=3", "ttt"),
        ("name.first=x", "name is not a section"),
        ("nonsense", "not of the form"),
        ("optimizer.lr=[1", "not valid YAML"),
    ],
)
def test_mistakes_name_their_key(recipe, override, named):
    with pytest.raises(UserError, match=named) as failure:
        load_config(recipe, [override])
    assert "\n" not in str(failure.value)


def test_mistakes_in_the_file(recipe):
    recipe.write_text(BASE + "seed: 1\nseed: 2\n")
    with pytest.raises(UserError, match="seed is given twice"):
        load_config(recipe)
    recipe.write_text("- a\n")
    with pytest.raises(UserError, match="must hold keys and values"):
        load_config(recipe)
    with pytest.raises(UserError, match="key data is missing"):
        parse_config({"name": "x", "schedule": {"steps": 1}})
    known = "demo, m3-tiny, minimax-m3"
    for missing in ("nothing", str(recipe.parent / "nowhere" / "x.yaml")):
        with pytest.raises(UserError, match=f"configuration {missing}: neither a file nor one of {known}"):
            load_config(missing)


@pytest.mark.parametrize("name", ["demo", "m3-tiny", "minimax-m3"])
def test_recipes_are_valid_and_can_be_planned(name):
    config = load_config(name)
    text = plan(config, resolve_config(config.target), world=2)
    for word in ("weights", "optimizer", "activations", "disk", "global batch", f"runs/{config.name}"):
        assert word in text


def test_the_plan_of_the_real_target():
    config = load_config("minimax-m3")
    text = plan(config, resolve_config("MiniMax-M3"), world=8)
    assert "3,263,735,808 parameters" in text and "layers [2, 30, 57]" in text
    assert "32 rows of 4096 tokens" in text and "spread over teams of 8 processes" in text

    def needs(*overrides: str) -> dict[str, float]:
        lines = plan(load_config("minimax-m3", overrides), resolve_config("MiniMax-M3"), world=8).splitlines()
        return {line[:18].strip(): float(line.split()[-2]) for line in lines if line.startswith("  ") and "GiB" in line}

    usual, small = needs(), needs("engine.activation_checkpointing=true", "engine.offload_optimizer=true")
    assert small["activations"] < 0.5 * usual["activations"] and "optimizer, host" in small.keys() - usual.keys()
    # 4 micro batches of 4,096 tokens for each of 8 ranks, 48 KiB a token.
    assert usual["features"] == 6.0


FITTING = {"hidden_size": 192, "target_hidden_size": 192, "vocab_size": 4096, "draft_vocab_size": 4096}


def test_the_plan_has_the_sizes_of_the_draft_that_is_continued(tmp_path):
    save_draft(random_draft(**FITTING | {"draft_vocab_size": 100}), tmp_path / "draft")
    config = load_config("demo", [f"draft.init_from={tmp_path / 'draft'}"])
    parameters = sum(p.numel() for p in random_draft(**FITTING | {"draft_vocab_size": 100}).parameters())
    assert f"{parameters:,} parameters" in plan(config, resolve_config("m3-tiny"))


def cut(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("changes", "damage", "named"),
    [
        ({}, lambda directory: (directory / "config.json").unlink(), "config.json does not exist"),
        ({}, lambda directory: (directory / "model.safetensors").unlink(), "has no model.safetensors"),
        ({}, cut, "model.safetensors is damaged"),
        ({}, lambda directory: directory.rename(directory.with_name("elsewhere")), "is neither `eagle3`, nor"),
        ({"target_hidden_size": 64}, None, "its target_hidden_size is 64, but the target has 192"),
        ({"vocab_size": 300, "draft_vocab_size": 300}, None, "its vocab_size is 300, but the target has 4096"),
        ({"taps": (1, 3, 99)}, None, r"taps \(1, 3, 99\) must be distinct"),
    ],
)
def test_the_plan_refuses_a_draft_that_the_run_refuses(tmp_path, changes, damage, named):
    save_draft(random_draft(**FITTING | changes), tmp_path / "draft")
    if damage is not None:
        damage(tmp_path / "draft")
    config, target = load_config("demo", [f"draft.init_from={tmp_path / 'draft'}"]), resolve_config("m3-tiny")
    for refuse in (plan, run_draft_config):
        with pytest.raises(UserError, match=named):
            refuse(config, target)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("intermediate_size=7", "draft.intermediate_size is 7, but draft .*, which is to be continued, has [0-9]+"),
        ("taps=[2,4,5]", r"draft.taps is \(2, 4, 5\), but draft .* has \(1, 3, 5\)"),
        ("fc_norm=false", "draft.fc_norm is False, but draft .* has True"),
        ("taps=[1,3,5]", None),
        ("intermediate_size=null", None),
    ],
)
def test_settings_that_contradict_the_draft_to_continue_are_refused(tmp_path, override, named):
    save_draft(random_draft(**FITTING, fc_norm=True), tmp_path / "draft")
    config = load_config("demo", [f"draft.init_from={tmp_path / 'draft'}", f"draft.{override}"])
    with pytest.raises(UserError, match=named) if named else contextlib.nullcontext():
        run_draft_config(config, resolve_config("m3-tiny"))


def test_the_plan_refuses_taps_that_the_target_lacks():
    with pytest.raises(UserError, match="ascending layers between 0 and 7"):
        plan(load_config("demo", ["draft.taps=[99]"]), resolve_config("m3-tiny"))


def test_a_plan_fetches_no_weights(tmp_path, monkeypatch):
    """Of a draft on the hub its config is enough."""
    save_draft(random_draft(**FITTING), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    fetched = []

    def snapshot(name, *, allow_patterns, **_):
        fetched.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("draft_model.resolve.snapshot_download", snapshot)
    config, target = load_config("demo", ["draft.init_from=someone/draft"]), resolve_config("m3-tiny")
    assert "taps entering layers [1, 3, 5]" in plan(config, target)
    assert fetched == [("someone/draft", ["*.json"])]
    # The run does not take what the plan has left in the cache for the whole.
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        run_draft_config(config, target)
    assert fetched[1:] == [("someone/draft", ["*.json", "*.safetensors"])] * 2
