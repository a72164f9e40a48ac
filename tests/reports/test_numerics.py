"""NUMERICS: loss, mask or precision errors inside the training step.

Reports R17 (mean over zero supervised tokens) and R22 (a mask without effect in one attention backend). Also tried, of
the same kind: a micro batch without a counting row beside a full one, an optimizer window of them alone, data of
nothing else, padding on the left and on the right, other batch sizes. Every state against its definition, both
backends, and what a perturbed token may reach are in tests/train/test_ttt.py; numbers that are not finite in
tests/train/test_finite.py.
"""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from target_model.errors import UserError
from target_model.resolve import resolve_target
from target_model.tokenizer import load_tokenizer
from tests.draft_model.drafts import random_draft
from tests.train.batches import random_features
from train.config import DataConfig, parse_config
from train.data import load_rows
from train.engine import DraftStep
from train.features import Features
from train.loss import Teacher, count_rows, step_weights

STEPS = 3


def write(path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_r17_cut_off_answers_leave_no_trace_in_the_data(tmp_path):
    """Three of 20 prompts fill the row alone: dropped, counted, and everything else is as without them."""
    tokenizer = load_tokenizer(resolve_target("m3-tiny").path)

    def chat(prompt: str) -> dict:
        return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": "an answer"}]}

    good = [chat(f"question {i}") for i in range(17)]
    bad = [chat("word " * 300) for _ in range(3)]
    mixed = [*good[:5], bad[0], *good[5:9], bad[1], bad[2], *good[9:]]
    loaded = []
    for name, rows in (("mixed", mixed), ("good", good)):
        config = DataConfig(path=write(tmp_path / name, rows), sequence_length=64, overflow="truncate")
        loaded.append(load_rows(config, tokenizer, 0))
    assert loaded[0].dropped["pieces without a supervised row"] == 3 and "3 pieces" in loaded[0].summary()
    for name in ("token_ids", "documents", "spans"):
        assert np.array_equal(*(vars(rows)[name] for rows in loaded))
    with pytest.raises(UserError, match="no row of .* can be trained on: .*3 pieces without a supervised row"):
        load_rows(replace_path(config, write(tmp_path / "bad", bad)), tokenizer, 0)


def replace_path(config: DataConfig, path: str) -> DataConfig:
    return config.model_copy(update={"path": path})


def loss_and_gradients(draft, batches: list[Features], attention="explicit") -> tuple[float, list[torch.Tensor]]:
    """Of one optimizer step over micro batches, normalised over all of them as the loop does."""
    draft.zero_grad()
    counts = sum(count_rows(batch.valid_steps, STEPS) for batch in batches)
    weights = step_weights(counts, 0.8)
    values = {"name": "x", "data": {"path": "x"}, "schedule": {"steps": 1}}
    step = DraftStep(draft, parse_config(values | {"ttt": {"steps": STEPS, "attention": attention}}))
    teacher = Teacher(torch.randn(300, 64, generator=torch.Generator().manual_seed(3)), None)
    total = 0.0
    for batch in batches:
        loss, _ = step(batch, teacher, weights)
        loss.backward()
        total += float(loss.detach())
    return total, [parameter.grad.clone() for parameter in draft.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("attention", ["explicit", "flash"])
def test_r17_a_micro_batch_without_a_counting_row(attention):
    draft = random_draft()
    full = random_features(draft.config, [[1] * 12], [[0] * 4 + [1] * 8], STEPS)
    empty = random_features(draft.config, [[1] * 12], [[0] * 12], STEPS, seed=1)
    loss, expected = loss_and_gradients(draft, [full], attention)
    for batches in ([full, empty], [empty, full]):
        again, gradients = loss_and_gradients(draft, batches, attention)
        assert again == loss and loss > 0
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    nothing, gradients = loss_and_gradients(draft, [empty, empty], attention)
    assert nothing == 0 and all(not gradient.any() for gradient in gradients)


def moved(features: Features, left: int, right: int) -> Features:
    """The same rows with padding on both sides; padding holds anything."""
    values = {}
    for entry in fields(Features):
        tensor = getattr(features, entry.name)
        if isinstance(tensor, torch.Tensor):
            sides = [torch.zeros_like(tensor[:, :1]).expand(-1, n, *tensor.shape[2:]) for n in (left, right)]
            if entry.name in ("aux", "final_state", "token_ids"):
                sides = [side + 7 for side in sides]
            tensor = torch.cat([sides[0], tensor, sides[1]], 1)
        values[entry.name] = tensor
    return Features(**values)


@pytest.mark.parametrize("attention", ["explicit", "flash"])
def test_r22_padding_and_batch_size_change_nothing(attention):
    """Left and right padding, alone or beside another row: the same loss and gradients in both backends."""
    draft = random_draft()
    pair = random_features(draft.config, [[1] * 7 + [2] * 7, [1] * 14], [[0, 0] + [1] * 5 + [2] * 7, [3] * 14], STEPS)
    expected, gradients = loss_and_gradients(draft, [pair], "explicit")

    def row(index: int) -> Features:
        values = {entry.name: getattr(pair, entry.name) for entry in fields(Features)}
        values = {
            name: value[index : index + 1] if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
        return replace(Features(**values), packed=index == 0)

    for batches in ([pair], [row(0), row(1)], [moved(pair, 0, 5)], [moved(pair, 3, 0)], [moved(row(0), 2, 2), row(1)]):
        loss, ours = loss_and_gradients(draft, batches, attention)
        assert loss == pytest.approx(expected, rel=1e-5)
        for mine, theirs in zip(ours, gradients, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)
