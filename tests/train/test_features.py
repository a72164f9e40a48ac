"""Captured features belong to their rows, whatever the grouping, packing or caching."""

from collections import Counter

import numpy as np
import pytest
import torch

from draft_model.chosen_blocks import ChosenBlocks
from tests.draft_model.drafts import random_draft
from tests.fixtures import random_target
from train.attention import chosen_keys
from train.data import TrainingRows
from train.features import OnlineCapture

TAPS = (1, 3, 5)


def make_rows(layout: list[list[int]], width: int) -> TrainingRows:
    """Documents of the given lengths in each row; two documents of one length are identical."""
    generator = np.random.default_rng(0)
    ids, documents = (np.zeros((len(layout), width), np.int32) for _ in range(2))
    known: dict[int, np.ndarray] = {}
    for row, lengths in enumerate(layout):
        start = 0
        for number, length in enumerate(lengths, 1):
            text = known.setdefault(length, generator.integers(0, 300, length))
            ids[row, start : start + length] = text
            documents[row, start : start + length] = number
            start += length
    return TrainingRows(ids, documents, np.where(documents > 0, documents, 0), Counter(), len(layout))


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("capture_rows", [1, 3, 16])
def test_every_document_has_the_features_of_a_run_alone(cache, capture_rows):
    target = random_target()
    rows = make_rows([[40], [17, 20], [33], [5, 9, 17], [40]], 40)
    capture = OnlineCapture(target, rows, TAPS, 3, capture_rows=capture_rows, cache=cache)
    for indices in ([3, 0, 1], [1, 2, 4], [1, 2, 4]):
        features = capture.features(np.array(indices))
        assert features.packed == bool({1, 3} & set(indices))
        for i, row in enumerate(indices):
            for number in range(1, rows.documents[row].max() + 1):
                inside = torch.from_numpy(rows.documents[row] == number)
                ids = torch.from_numpy(rows.token_ids[row].astype(np.int64))[inside]
                final, aux = target.capture(ids[None], TAPS)
                torch.testing.assert_close(features.final_state[i][inside], final[0], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(features.aux[i][inside], aux[0], atol=1e-4, rtol=1e-4)
                assert features.positions[i][inside].tolist() == list(range(len(ids)))


def test_a_packed_row_goes_by_the_choices_of_its_documents():
    """The blocks of a sparse draft count from each document's start, and the mask never leaves it."""
    target, config = random_target(), random_draft().config
    chosen = ChosenBlocks.parse("sparse", target.config, config)
    rows = make_rows([[40, 31], [60]], 71)
    features = OnlineCapture(target, rows, TAPS, 3, chosen=chosen).features(np.array([0, 1]))
    mask = chosen_keys(features.blocks, features.positions, config.num_heads)
    assert features.blocks.size == target.config.block_size and not mask[1, :, 59, :58].all()
    for row, number, length in ((0, 1, 40), (0, 2, 31), (1, 1, 60)):
        inside = torch.from_numpy(rows.documents[row] == number)
        ids = torch.from_numpy(rows.token_ids[row].astype(np.int64))[inside]
        _, _, alone = OnlineCapture(target, rows, TAPS, 3, chosen=chosen).text(ids[None])
        assert torch.equal(features.blocks.lists[row][inside], alone.lists[0])
        expected = chosen_keys(alone, torch.arange(length)[None], config.num_heads)
        assert torch.equal(mask[row][:, inside][:, :, inside], expected[0])


def test_the_cache_spares_the_target(monkeypatch):
    target = random_target()
    capture = OnlineCapture(target, make_rows([[20], [30], [25]], 30), TAPS, 3, cache=True)
    first = capture.features(np.array([0, 1, 2]))
    monkeypatch.setattr(target, "capture", lambda *_: pytest.fail("captured again"))
    again = capture.features(np.array([2, 0]))
    assert again.token_ids.shape == (2, 25)
    assert torch.equal(again.aux[1, :20], first.aux[0, :20]) and torch.equal(
        again.final_state[0], first.final_state[2, :25]
    )


def test_the_teacher_is_the_target():
    """The final state is behind exactly one final norm: the head gives the target's own logits."""
    target = random_target()
    rows = make_rows([[50]], 50)
    features = OnlineCapture(target, rows, TAPS, 3).features(np.array([0]))
    from target_model.batch import Batch
    from target_model.cache import PagedCache
    from train.loss import Teacher

    batch = Batch.causal(8, "cpu", [rows.token_ids[0].tolist()], [0], [list(range(7))])
    output = target(batch, PagedCache(target.config, 7, dtype=torch.float32, device="cpu"))
    expected = target.logits(output.final_state).log_softmax(-1)
    log_p, best, _ = Teacher(target.lm_head.weight, None).distribution(features.final_state[0])
    torch.testing.assert_close(log_p, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(best, expected.argmax(-1))
