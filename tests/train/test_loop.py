"""Whole runs on m3-tiny: they learn, resume exactly, judge, export, and DeepSpeed does the work."""

import json
import os
import shutil
import sys
from pathlib import Path

import deepspeed
import pytest
import torch

from draft_model.checkpoint import load_draft
from draft_model.resolve import list_runs
from target_model.checkpoint import load_target
from target_model.errors import UserError
from train import engine as engine_module
from train.config import EngineConfig, parse_config
from train.loop import train
from train.schedule import DataOrder, learning_rate, share_batch

TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "for i in range(10):\n    print(i)\n",
    "x = [1, 2, 3]\ny = sum(x)\nprint(y)\n",
    "import os\nprint(os.getcwd())\nos.chdir('..')\n",
    "class A:\n    def __init__(self):\n        self.x = 1\n",
    "try:\n    f()\nexcept ValueError:\n    pass\n",
    "while True:\n    break\nelse:\n    print('no')\n",
]


@pytest.fixture
def settings(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": text * 2}) + "\n" for text in TEXTS))

    def make(name="run", **changes):
        values = {
            "name": name,
            "output": str(tmp_path / "runs"),
            "data": {"path": str(data), "sequence_length": 40},
            "ttt": {"steps": 3},
            "optimizer": {"lr": 2e-3},
            "schedule": {"steps": 20, "warmup": 0.4},
            "engine": {"device": "cpu", "dtype": "float32", "micro_batch": 1, "accumulate": 3, "threads": 1},
            "checkpoint": {"every": 10, "export_dtype": "float32"},
            "log": {"every": 1},
            "features": {"cache": True},
        }
        for key, value in changes.items():
            section, _, field = key.partition("__")
            if field:
                values.setdefault(section, {})[field] = value
            else:
                values[section] = value
        return parse_config(values)

    return make


def log_of(result):
    return [json.loads(line) for line in (result.directory / "log.jsonl").read_text().splitlines()]


def same_weights(first, second):
    ours, theirs = (load_draft(result.draft).state_dict() for result in (first, second))
    return all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_it_learns_and_exports(settings):
    result = train(settings(schedule__steps=40, engine__zero_stage=1), progress=False)
    log = log_of(result)
    assert [line["step"] for line in log] == list(range(1, 41))
    assert log[-1]["loss"] < 0.7 * log[0]["loss"] and log[-1]["tau_sim"] > log[0]["tau_sim"]
    assert log[-1]["grad_norm"] > 0 and log[-1]["tokens"] > 1000
    draft, target = load_draft(result.draft), load_target("m3-tiny")
    assert torch.equal(draft.embed_tokens.weight, target.embed_tokens.weight)  # frozen
    assert not torch.equal(draft.lm_head.weight, target.lm_head.weight)  # trained
    record = json.loads((result.directory / "run.json").read_text())
    assert record["complete"] and record["step"] == 40 and record["target"] == "m3-tiny"
    assert [run.name for run in list_runs(result.directory.parent)] == ["run"]


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_resume_is_exact(settings, stage):
    """20 steps = 10 + 10 = 7 + 13, in mid-epoch, bit for bit: weights, losses, learning rates."""
    straight = train(settings("straight", engine__zero_stage=stage), progress=False)
    expected = [(line["step"], line["lr"], line["loss"]) for line in log_of(straight)]
    assert len({round(lr, 9) for _, lr, _ in expected}) > 10
    for name, stop in (("ten", 10), ("seven", 7)):
        config = settings(name, engine__zero_stage=stage)
        part = train(config, progress=False, stop=stop.__eq__)
        assert part.step == stop
        torch.manual_seed(99)
        resumed = train(config, progress=False)
        assert resumed.step == 20
        assert [(line["step"], line["lr"], line["loss"]) for line in log_of(resumed)] == expected
        assert same_weights(straight, resumed)


def test_resume_after_a_kill_repeats_what_was_not_saved(settings):
    straight = train(settings("straight"), progress=False)
    config = settings("killed")
    train(config, progress=False, stop=(14).__eq__)
    # As if the process had died at step 14 with the checkpoint of step 10 as its last, and another half written.
    state = config.run_directory / "state"
    (state / "step-00000014").rename(state / "step-00000014.partial")
    reached = []
    resumed = train(config, progress=False, stop=lambda step: reached.append(step))
    assert sorted(set(reached)) == list(range(10, 21))
    assert [line["step"] for line in log_of(resumed)] == list(range(1, 21))
    assert same_weights(straight, resumed)
    assert sorted(path.name for path in state.iterdir()) == ["step-00000010", "step-00000020"]


@pytest.mark.parametrize("harm", ["cut", "missing"])
def test_a_damaged_checkpoint_is_named(settings, harm):
    config = settings(schedule__steps=3, checkpoint__every=1, engine__zero_stage=1)
    train(config, progress=False, stop=(2).__eq__)
    state = config.run_directory / "state"
    saved = state / "step-00000002" / "mp_rank_00_model_states.pt"
    if harm == "cut":
        os.truncate(saved, 1000)
    else:
        saved.unlink()
    named = f"checkpoint {saved.parent} lacks files" if harm == "missing" else f"{saved} is damaged"
    with pytest.raises(UserError) as told:
        train(config, progress=False)
    way_on = f"delete {saved.parent} to go on from step-00000001, or set resume=false to replace the run"
    assert str(told.value) == f"{named}: {way_on}"
    shutil.rmtree(saved.parent)
    assert train(config, progress=False).step == 3


def test_bfloat16_resumes_too(settings):
    """fp32 masters and moments survive, at ZeRO 0 as well."""
    for stage in (0, 1):
        change = {"engine__dtype": "bfloat16", "engine__zero_stage": stage, "schedule__steps": 6}
        straight = train(settings(f"straight{stage}", **change), progress=False)
        config = settings(f"cut{stage}", **change)
        train(config, progress=False, stop=(3).__eq__)
        assert same_weights(straight, train(config, progress=False)), stage


def test_frozen_and_pruned_parts_survive_a_resume(settings):
    change = {"draft__draft_vocab_size": 64, "draft__train_head": False, "schedule__steps": 4}
    config = settings("pruned", **change)
    train(config, progress=False, stop=(2).__eq__)
    resumed = train(config, progress=False)
    draft, target = load_draft(resumed.draft), load_target("m3-tiny")
    kept = draft.target_ids(torch.arange(64))
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight[kept])
    saved = list((resumed.directory / "state").glob("*/*model_states.pt"))
    assert saved and all(path.stat().st_size < 3e7 for path in saved)  # the target is not in it


def test_the_judge_chooses_the_best(settings):
    seen = []

    def judge(draft, target):
        seen.append(draft.fc.weight.clone())
        return {"al": {1: 1.5, 2: 2.5, 3: 2.0}[len(seen)], "note": "x"}

    config = settings("judged", eval__every=4, schedule__steps=12)
    result = train(config, judge=judge, progress=False)
    assert len(seen) == 3 and result.best == {"al": 2.5, "note": "x", "step": 8}
    assert torch.equal(load_draft(result.draft).fc.weight, seen[1])
    # A judgement in the middle changes nothing that follows.
    plain = train(settings("plain", schedule__steps=12), progress=False)
    losses = [[line["loss"] for line in log_of(r) if "loss" in line] for r in (result, plain)]
    assert losses[0] == losses[1]
    assert list_runs(result.directory.parent)[0].best_al == 2.5


def test_accumulation_is_the_large_batch(settings):
    """Row weights are those of the whole step, so 3 micro batches of 2 give the losses and gradients of one of 6."""
    runs = []
    for accumulate in (1, 3):
        change = {"engine__accumulate": accumulate, "engine__micro_batch": 6 // accumulate, "engine__zero_stage": 1}
        lines = log_of(train(settings(f"a{accumulate}", schedule__steps=5, **change), progress=False))
        runs.append([(line["loss"], line["grad_norm"]) for line in lines])
    for first, second in zip(*runs, strict=True):
        assert first == pytest.approx(second, rel=1e-3)


def test_deepspeed_is_the_engine(settings, monkeypatch):
    engines = []
    original = engine_module.DraftEngine.__init__

    def remember(self, *args):
        original(self, *args)
        engines.append(self.engine)
        partitions = sum(t.numel() for group in self.engine.optimizer.param_groups for t in group["params"])
        engines.append(partitions)

    monkeypatch.setattr(engine_module.DraftEngine, "__init__", remember)
    train(settings("ds", engine__zero_stage=1, schedule__steps=1), progress=False)
    engine, partition = engines
    assert isinstance(engine, deepspeed.DeepSpeedEngine) and engine.zero_optimization_stage() == 1
    trained = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    assert trained <= partition < trained + 4096  # a world of one holds all of it, padded
    assert engine.gradient_accumulation_steps() == 3 and engine.gradient_clipping() == 1.0


def test_a_run_leaves_no_thread_behind(settings):
    """A worker of gloo that still releases tensors while the interpreter ends would abort the process."""
    train(settings("threads", schedule__steps=1), progress=False)
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert not torch.distributed.is_initialized() and "RANK" not in os.environ
    assert names and not [name for name in names if "gloo" in name or "tcpstore" in name]


def test_a_sparse_draft_trains(settings):
    """Rows are longer than the blocks that m3-tiny's last layer chooses, so the mask matters."""
    losses = []
    for attention in ("sparse", "full"):
        change = {"ttt__draft_attention": attention, "schedule__steps": 2, "features__cache": False}
        change |= {"data__sequence_length": 256, "data__packing": False}
        config = settings(attention, **change)
        text = "".join(f"x{i} = {i} * {i + 7}\n" for i in range(40))
        Path(config.data.path).write_text(json.dumps({"text": text}) + "\n")
        losses.append([line["loss"] for line in log_of(train(config, progress=False))])
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.2)
    with pytest.raises(UserError, match=r"ttt\.draft_attention=sparse:3 needs the target's choices"):
        settings("x", ttt__draft_attention="sparse:3", features__cache=True)


def test_offload_checkpointing_and_overrides_reach_deepspeed(settings, monkeypatch):
    engines = []
    real = deepspeed.initialize
    monkeypatch.setattr(deepspeed, "initialize", lambda **k: engines.append(real(**k)) or engines[-1])
    plain = train(settings("plain", engine__zero_stage=2, schedule__steps=3), progress=False)
    changes = {"engine__offload_optimizer": True, "engine__activation_checkpointing": True}
    override = {"zero_optimization": {"reduce_bucket_size": 12345}, "gradient_clipping": 1.0}
    moved = train(
        settings("moved", engine__zero_stage=2, schedule__steps=3, engine__deepspeed=override, **changes),
        progress=False,
    )
    ours, theirs = (load_draft(result.draft).state_dict() for result in (moved, plain))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-6, rtol=1e-4)
    engine = engines[1][0]
    assert engine.zero_offload_optimizer().device == "cpu" and engine.zero_reduce_bucket_size() == 12345
    assert engine.zero_optimization_stage() == 2 and engines[0][0].zero_offload_optimizer() is None
    for wrong in ({"engine__offload_optimizer": True}, {"engine__offload_parameters": True, "engine__zero_stage": 2}):
        with pytest.raises(UserError, match=r"engine: offload_\w+ needs zero_stage"):
            settings("x", **wrong)


def test_a_run_with_other_settings_is_refused(settings):
    train(settings(schedule__steps=2), progress=False)
    with pytest.raises(UserError, match=r"trained with optimizer\.lr=0\.002, now 0\.1: choose another name"):
        train(settings(schedule__steps=2, optimizer__lr=0.1), progress=False)
    again = train(settings(schedule__steps=2, optimizer__lr=0.1, resume=False), progress=False)
    assert again.step == 2


def test_divergence_and_a_full_disk_are_told(settings, monkeypatch):
    with pytest.raises(UserError, match=r"not finite at step \d+: lower optimizer\.lr"):
        train(settings("wild", optimizer__lr=1e30), progress=False)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(deepspeed.DeepSpeedEngine, "save_checkpoint", full)
    config = settings("full", schedule__steps=2)
    with pytest.raises(UserError, match="could not be written: .*No space"):
        train(config, progress=False)
    assert list((config.run_directory / "state").iterdir()) == []
    monkeypatch.undo()
    usage = type("usage", (), {"free": 10**6})
    monkeypatch.setattr("train.run.shutil.disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"0\.00 GB free, but checkpoints of this run need 0\.1"):
        train(settings("small", schedule__steps=2), progress=False)

    def fills_up(draft, target):
        usage.free = 10**6
        return {"al": 1.0}

    usage.free = 10**12  # room at the start, none any more when the checkpoint is due
    with pytest.raises(UserError, match=r"0\.00 GB free, but checkpoints of this run need 0\.0"):
        train(settings("later", schedule__steps=2, eval__every=1), judge=fills_up, progress=False)


def test_a_run_ends_early_and_keeps_the_last_and_the_best_checkpoint(settings):
    seen = []

    def judge(draft, target):
        seen.append(target)
        return {"al": [1.5, 2.5, 2.0, 2.4, 2.5][len(seen) - 1], "chain": 2}

    config = settings("early", eval__every=2, eval__patience=3, checkpoint__every=2, checkpoint__keep=1)
    part = train(config, judge=judge, progress=False, stop=(7).__eq__)
    assert part.step == 7 and not json.loads((config.run_directory / "run.json").read_text())["complete"]
    result = train(config, judge=judge, progress=False)
    assert (
        result.step == 10 and result.best["step"] == 4 and len(seen) == 5
    )  # the third worse one, over the interruption
    assert all(target is not None for target in seen)
    left = sorted(path.name for path in (config.run_directory / "state").glob("step-*"))
    assert left == ["step-00000004", "step-00000010"]
    record = json.loads((config.run_directory / "run.json").read_text())
    assert record["complete"] and record["step"] == 10
    assert train(config, judge=judge, progress=False).step == 10 and len(seen) == 5
    lines = log_of(result)
    judged = next(line["judge"] for line in lines if "judge" in line and line["step"] == 4)
    accuracy = next(line["step_accuracy"] for line in lines if "loss" in line and line["step"] == 4)
    assert judged["tau_sim"] == pytest.approx(1 + accuracy[0] + accuracy[0] * accuracy[1])
    with pytest.raises(UserError, match=r"eval: patience needs eval\.every"):
        settings("x", eval__patience=1)


def test_trackers_and_curves(settings):
    """Everything goes to log.jsonl; Weights & Biases and TensorBoard are imported only when asked for."""
    assert settings().log.wandb == "disabled"
    train(settings("off", schedule__steps=1, log__curves=False), progress=False)
    assert not {"train.tracking", "train.tensorboard"} & sys.modules.keys()  # the only importers of both
    changes = {"log__wandb": "offline", "log__tensorboard": True, "eval__every": 2}
    result = train(settings("tracked", schedule__steps=2, **changes), judge=lambda *_: {"al": 1.5}, progress=False)
    assert list(result.directory.glob("wandb/offline-run-*"))
    (events,) = (result.directory / "tensorboard").iterdir()
    for name in (b"loss", b"step_accuracy/2", b"judge/al"):
        assert name in events.read_bytes()
    picture = (result.directory / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    assert not (result.directory.parent / "off" / "curves.png").exists()


def test_regression_start_is_better_than_a_random_one(settings):
    losses = []
    for start in ("random", "regression"):
        config = settings(start, draft__initialisation=start, schedule__steps=1, engine__accumulate=7)
        losses.append(log_of(train(config, progress=False))[0]["loss"])
    assert losses[1] < 0.7 * losses[0]


def test_a_run_killed_before_its_first_checkpoint_starts_a_new_log(settings):
    config = settings("killed", schedule__steps=5)
    train(config, progress=False, stop=(3).__eq__)
    shutil.rmtree(config.run_directory / "state" / "step-00000003")
    assert [line["step"] for line in log_of(train(config, progress=False))] == [1, 2, 3, 4, 5]


def test_a_run_that_is_stopped_while_it_is_judged_ends_there(settings):
    signals = []
    config = settings("judged", eval__every=4)
    part = train(
        config, judge=lambda *_: signals.append(1) or {"al": 1.0}, progress=False, stop=lambda _: bool(signals)
    )
    assert (part.step, part.stopped, part.best["step"]) == (4, True, 4)
    assert [path.name for path in (config.run_directory / "state").iterdir()] == ["step-00000004"]


def test_a_draft_to_continue_keeps_its_weights(settings):
    """Also under a recipe whose drafts start from a fit."""
    first = train(settings("first", schedule__steps=4), progress=False)
    losses = []
    for start in ("random", "regression"):
        # The run's folder will do.
        again = {"draft__init_from": str(first.directory), "draft__initialisation": start}
        losses.append(log_of(train(settings(f"again-{start}", schedule__steps=1, **again), progress=False))[0]["loss"])
    assert losses[0] == losses[1] < log_of(first)[0]["loss"]


def test_order_and_schedule_depend_on_the_step_alone():
    order = DataOrder(7, 3, seed=1)
    batches = [order.batch(step).tolist() for step in range(14)]
    flat = sum(batches, [])
    for epoch in range(6):
        assert sorted(flat[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert flat[:7] != flat[7:14]
    assert DataOrder(7, 3, seed=1).batch(9).tolist() == batches[9]
    schedule = parse_config(
        {"name": "x", "data": {"path": "x"}, "schedule": {"steps": 10, "warmup": 0.2, "final": 0.1}}
    )
    rates = [learning_rate(step, 10, 1.0, schedule.schedule) for step in range(11)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates[10] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(rates[2:], rates[3:], strict=False))


def test_the_rows_of_a_step_stay_when_the_processes_change():
    engine = EngineConfig(micro_batch=4, accumulate=3)
    shapes = {world: share_batch(engine, 2, world) for world in (1, 2, 3, 4, 8, 12, 24)}
    assert {world: (shape.micro_batch, shape.accumulate) for world, shape in shapes.items()} == {
        1: (4, 6), 2: (4, 3), 3: (4, 2), 4: (3, 2), 8: (3, 1), 12: (2, 1), 24: (1, 1),
    }  # fmt: skip
    with pytest.raises(UserError, match="began with 2 processes and has 24 rows in a step, which 5 cannot share"):
        share_batch(engine, 2, 5)
