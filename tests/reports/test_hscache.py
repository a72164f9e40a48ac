"""HSCACHE: stored hidden states belong to another sample, are too short, or are not numbers.

Report R10 (slices of a batch by running offset, state left between calls, a cached prefix skipped). Also tried, of the
same"""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from spec import cli
from target_model.errors import UserError
from target_model.model import TargetModel
from tests.fixtures import random_target
from train.capture import capture_store
from train.config import parse_config
from train.data import TrainingRows
from train.features import OnlineCapture
from train.store import FeatureStore

TAPS = (1, 3, 5)


def nine_prompts() -> list[np.ndarray]:
    """Lengths 3 to 70; three share 32 tokens, two are identical."""
    generator = np.random.default_rng(0)
    prefix, twin = (generator.integers(0, 300, n) for n in (32, 17))
    shared = [np.concatenate([prefix, generator.integers(0, 300, n)]) for n in (1, 9, 38)]
    return [*shared, twin, twin.copy(), *(generator.integers(0, 300, n) for n in (3, 8, 40, 64))]


def rows_of(prompts: list[np.ndarray]) -> TrainingRows:
    ids, documents = (np.zeros((len(prompts), 70), np.int32) for _ in range(2))
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)], documents[row, : len(prompt)] = prompt, 1
    return TrainingRows(ids, documents, documents.copy(), Counter(), len(prompts))


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("capture_rows", [1, 4, 16])
def test_r10_every_grouping_gives_a_prompt_its_own_states(capture_rows, cache):
    """One by one, all at once, in reverse order, twice in a row, in groups of at most `capture_rows`."""
    target, prompts = random_target(), nine_prompts()
    source = OnlineCapture(target, rows_of(prompts), TAPS, 3, capture_rows=capture_rows, cache=cache)
    alone = [target.capture(torch.from_numpy(prompt)[None], TAPS) for prompt in prompts]
    everyone = list(range(9))
    for order in (everyone, everyone, everyone[::-1], [4, 0, 2], *([i] for i in everyone)):
        features = source.features(np.array(order))
        for i, row in enumerate(order):
            length = len(prompts[row])
            assert (features.documents[i] > 0).sum() == length
            assert features.token_ids[i, :length].tolist() == prompts[row].tolist()
            final, aux = alone[row]
            assert (features.final_state[i, :length] - final[0]).abs().max() < 1e-4
            assert (features.aux[i, :length] - aux[0]).abs().max() < 1e-4


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "rows.jsonl"
    texts = [f"value_{i} = {i}\nprint(value_{i})\n" * (1 + i % 4) for i in range(9)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return parse_config(
        {
            "name": "x",
            "data": {"path": str(path), "sequence_length": 64},
            "schedule": {"steps": 1},
            "engine": {"device": "cpu", "dtype": "float32"},
            "features": {"capture_rows": 2},
        }
    )


def broken(original, calls: set[int], damage):
    count = 0

    def capture(self, token_ids, taps):
        nonlocal count
        count += 1
        final, aux = original(self, token_ids, taps)
        return damage(final, aux) if count in calls else (final, aux)

    return capture


def not_a_number(final, aux):
    aux = aux.clone()
    aux[-1, 2, 7] = float("nan")
    return final, aux


def test_r10_the_store_holds_each_row_once_with_its_ids(settings, tmp_path):
    capture_store(settings, tmp_path / "store", dtype="fp32", shard_rows=4, note=lambda _: None)
    store = FeatureStore(tmp_path / "store")
    store.prepare({}, 3, torch.device("cpu"), torch.float32)
    from target_model.checkpoint import load_target

    source = OnlineCapture(load_target("m3-tiny"), store.rows, tuple(store.manifest["taps"]), 3)
    for order in ([8, 0, 4], [3, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8]):
        stored, fresh = store.features(np.array(order)), source.features(np.array(order))
        assert torch.equal(stored.token_ids, fresh.token_ids) and torch.equal(stored.valid_steps, fresh.valid_steps)
        inside = stored.documents > 0
        for name in ("aux", "final_state"):
            assert (vars(stored)[name] - vars(fresh)[name])[inside].abs().max() < 1e-3


def test_r10_a_bad_row_is_refused_and_counted(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(TargetModel, "capture", broken(TargetModel.capture, {2}, not_a_number))
    lines = []
    result = capture_store(settings, tmp_path / "store", dtype="fp32", shard_rows=4, note=lines.append)
    assert (result.rows, result.refused) == (8, 1) and any("1 rows refused" in line for line in lines)
    store = FeatureStore(tmp_path / "store")
    assert len(store.rows) == 8 and "1 rows whose features were not finite" in store.rows.summary()


def test_r10_many_bad_rows_end_the_capture(settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(TargetModel, "capture", broken(TargetModel.capture, {2, 3}, not_a_number))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(settings.model_dump()))
    monkeypatch.setattr("sys.argv", ["spec", "capture", "--config", str(recipe), "--output", str(tmp_path / "store")])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and "2 of 9 rows have features that are not finite" in capsys.readouterr().err
    with pytest.raises(UserError, match="is not complete"):
        FeatureStore(tmp_path / "store")


def test_r10_a_short_capture_is_refused(settings, tmp_path, monkeypatch):
    shorter = broken(TargetModel.capture, {2}, lambda final, aux: (final[:, :-1], aux[:, :-1]))
    monkeypatch.setattr(TargetModel, "capture", shorter)
    with pytest.raises(UserError, match=r"row \d: the features that came back are not those of its \d+ tokens"):
        capture_store(settings, tmp_path / "store", dtype="fp32", note=lambda _: None)
