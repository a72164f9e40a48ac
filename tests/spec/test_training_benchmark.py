"""The training benchmark compares like with like: the plain implementation has our gradients."""

import json

import pytest
import torch

from draft_model.model import Eagle3Draft
from spec.bench import training
from spec.bench.plain_step import masked_rows, plain_loss
from target_model.errors import UserError
from train.loss import LossSettings, Teacher, ttt_loss
from train.ttt import unroll, valid_rows

CPU = torch.device("cpu")


def test_plain_has_the_gradients_of_training():
    config, steps, length = training.draft_config(small=True), 3, 24
    features = training.random_features(config, length, steps, CPU, torch.float32)
    head, weights = training._teacher_head(config, CPU, torch.float32), training._weights(features, steps)
    draft = training.random_draft(config, CPU)
    plain_loss(draft, features, head, weights, masked_rows).backward()
    plain = {name: parameter.grad.clone() for name, parameter in draft.named_parameters() if parameter.requires_grad}
    draft.zero_grad()
    rows = valid_rows(features.valid_steps, steps)
    loss, _ = ttt_loss(
        unroll(draft, features, rows),
        rows,
        draft.lm_head.weight,
        features.final_state,
        features.valid_steps,
        weights,
        Teacher(head, None),
        LossSettings(),
    )
    loss.backward()
    assert len(plain) > 8
    for name, gradient in plain.items():
        torch.testing.assert_close(draft.get_parameter(name).grad, gradient, atol=1e-6, rtol=1e-3, msg=name)


def test_one_command_measures_all_and_ends_with_json(capsys, monkeypatch):
    settings = training.Settings(sequence=48, long=96, ttt_steps=3, repeats=1, small=True)
    results = training.run(settings, "cpu", None)
    assert [(each.name, each.sequence) for each in results] == [("ours", 48), ("ours", 96), ("plain", 48)]
    assert all(each.tokens_per_second > 0 and each.loss > 0 for each in results)
    out = capsys.readouterr().out.strip().splitlines()
    assert json.loads(out[-1])["results"][2]["name"] == "plain" and any("tokens/s" in line for line in out)

    def no_room(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(training, "measure_plain", no_room)
    settings = training.Settings(sequence=48, long=0, ttt_steps=2, repeats=1, small=True)
    assert training.run(settings, "cpu", None)[-1] == training.Measurement("plain", 48)
    assert "out of memory" in capsys.readouterr().out


def test_the_real_size_needs_a_gpu():
    with pytest.raises(UserError, match="needs a CUDA device"):
        training.run(training.Settings(), "cpu", None)
    with torch.device("meta"):
        draft = Eagle3Draft(training.draft_config(small=False))
    assert sum(parameter.numel() for parameter in draft.parameters()) == 3_263_735_808
