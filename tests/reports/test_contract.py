"""CONTRACT: trainer, store, server and reference disagree about a tap, a norm, a rotation or an activation.

Reports R3 (taps one layer off), R7 (final norm applied twice or not at all) and R18 (activation constants, 1 + w norms,
partial rotation lost on some path). Also tried, of the same kind: taps in any order of the list, a tree that branches,
prefixes across block edges, every constant changed alone on prefill, decode, tree and capture. Exports and imports keep
taps in tests/draft_model; all layers against `transformers` in tests/target_model/test_parity.py.
"""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from draft_model.checkpoint import load_draft, save_draft
from target_model.batch import Batch
from target_model.cache import PagedCache
from target_model.checkpoint import fill_model
from target_model.config import M3Config, default_taps
from target_model.errors import UserError
from tests.draft_model.drafts import random_draft
from tests.fixtures import published_json, random_target, random_tensors, tiny_config
from train.config import parse_config
from train.data import TrainingRows
from train.features import OnlineCapture
from train.loss import Teacher
from train.store import FeatureStore

LENGTH = 20


def one_row(length: int = LENGTH) -> TrainingRows:
    ids = np.random.default_rng(0).integers(0, 300, (1, length)).astype(np.int32)
    return TrainingRows(ids, np.ones_like(ids), np.ones_like(ids), Counter(), 1)


def served(target, ids: list[int], taps: tuple[int, ...], committed: int):
    """Taps and final states of a prefill of `committed` tokens and a tree verification of the others (a chain)."""
    cache = PagedCache(target.config, 8, dtype=torch.float32, device="cpu")
    table, rest = [[5, 2, 7, 0, 3, 1, 4, 6]], len(ids) - committed
    block = target.config.block_size
    prefill = target(Batch.causal(block, "cpu", [ids[:committed]], [0], table), cache, taps)
    masks = [[(2 << i) - 1 for i in range(rest)]]
    tree = Batch.tree(block, "cpu", [ids[committed:]], [committed], table, [list(range(rest))], masks)
    verified = target(tree, cache, taps)
    return torch.cat([prefill.aux, verified.aux]), torch.cat([prefill.final_state, verified.final_state])


def hooked(target, ids: list[int], taps: tuple[int, ...]) -> torch.Tensor:
    """The residual stream entering the layers, seen by plain forward hooks."""
    entering: dict[int, torch.Tensor] = {}

    def remember(layer: int):
        return lambda module, arguments: entering.__setitem__(layer, arguments[1].detach().clone())

    handles = [layer.register_forward_pre_hook(remember(i)) for i, layer in enumerate(target.layers)]
    table = [list(range(8))]
    cache = PagedCache(target.config, 8, dtype=torch.float32, device="cpu")
    target(Batch.causal(target.config.block_size, "cpu", [ids], [0], table), cache)
    for handle in handles:
        handle.remove()
    return torch.cat([entering[tap] for tap in taps], -1)


@pytest.mark.parametrize("taps", [(1, 2, 3), (2, 3, 4), (0, 3, 5)])
def test_r3_every_path_taps_the_same_layers(taps, tmp_path):
    target, rows = random_target(), one_row()
    ids = rows.token_ids[0].tolist()
    trained = OnlineCapture(target, rows, taps, 3).features(np.array([0]))
    aux, final = served(target, ids, taps, committed=13)
    for found, expected in ((trained.aux[0], aux), (trained.final_state[0], final), (hooked(target, ids, taps), aux)):
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    save_draft(random_draft(taps=taps), tmp_path / "draft")
    assert load_draft(tmp_path / "draft").config.taps == taps


def test_r3_few_layers_are_refused():
    with pytest.raises(UserError, match="7 layers"):
        default_taps(3)
    with pytest.raises(UserError):
        random_target().config.check_taps((0, 3, 6))


@pytest.fixture(scope="module")
def tiny_store(tmp_path_factory):
    """A store of m3-tiny, whose final norm is far from trivial, beside what it was captured from."""
    from train.capture import capture_store

    directory = tmp_path_factory.mktemp("contract")
    (directory / "rows.jsonl").write_text(json.dumps({"text": "def add(a, b):\n    return a + b\n" * 5}) + "\n")
    config = parse_config(
        {
            "name": "x",
            "data": {"path": str(directory / "rows.jsonl"), "sequence_length": 64},
            "schedule": {"steps": 1},
            "engine": {"device": "cpu", "dtype": "float32"},
        }
    )
    capture_store(config, directory / "store", dtype="fp32", note=lambda _: None)
    return directory / "store"


def test_r7_the_teacher_is_the_target_online_and_from_the_store(tiny_store):
    from target_model.checkpoint import load_target

    target = load_target("m3-tiny")
    store = FeatureStore(tiny_store)
    store.prepare({}, 3, torch.device("cpu"), torch.float32)
    ids = store.rows.token_ids[0, : int((store.rows.documents[0] > 0).sum())].tolist()
    taps = tuple(store.manifest["taps"])
    aux, final = served(target, ids, taps, committed=len(ids) - 5)
    expected = target.logits(final)
    assert len(ids) >= 50 and (target.norm.scale - target.norm.scale.mean()).abs().max() > 0.05
    online = OnlineCapture(target, store.rows, taps, 3).features(np.array([0]))
    for features in (online, store.features(np.array([0]))):
        log_p, best, _ = Teacher(target.lm_head.weight, None).distribution(features.final_state[0])
        assert (log_p - expected.log_softmax(-1)).abs().max() < 1e-4
        assert torch.equal(best, expected.argmax(-1))
        torch.testing.assert_close(features.aux[0], aux, atol=1e-4, rtol=1e-4)


CONSTANTS = [
    {"swiglu_alpha": 1.0},
    {"swiglu_beta": 0.0},
    {"swiglu_limit": 0.05},
    {"rotary_dim": 4},
    {"rope_theta": 100.0},
    {"rms_norm_eps": 1e-1},
    {"routed_scaling_factor": 1.0},
]


@pytest.mark.parametrize("change", CONSTANTS, ids=lambda change: next(iter(change)))
@torch.no_grad()
def test_r18_every_constant_reaches_every_path(change):
    """The same weights under another constant: prefill, tree verification and capture all change, and alike."""
    rows, taps = one_row(), (1, 3, 5)
    ids = rows.token_ids[0].tolist()
    before, after = random_target(), random_target(**change)
    for name, weight in before.named_parameters():
        assert torch.equal(weight, after.get_parameter(name)), name
    first, second = (served(target, ids, taps, committed=13)[1] for target in (before, after))
    differs = (first - second).abs().amax(-1) > 1e-4
    # Rotation alone leaves position 0 as it is.
    assert differs[1:13].all() and differs[13:].all()
    captured = OnlineCapture(after, rows, taps, 3).features(np.array([0])).final_state[0]
    torch.testing.assert_close(captured, second, atol=1e-5, rtol=1e-5)


def test_r18_a_norm_of_weight_zero_is_plain_normalisation():
    """Published weights are w of 1 + w."""
    zeroed = [(spec, 0 * value if spec.kind == "norm" else value) for spec, value in random_tensors(tiny_config())]
    target = fill_model(tiny_config(), [entry for entry in zeroed if not entry[0].is_vision], vision=False)
    final, _ = target.capture(torch.from_numpy(one_row().token_ids.astype(np.int64)), (1, 3, 5))
    torch.testing.assert_close(final.square().mean(-1), torch.ones(1, LENGTH), atol=1e-3, rtol=0)


def test_r18_an_unknown_activation_is_an_error():
    document = published_json(tiny_config())
    document["text_config"]["hidden_act"] = "relu"
    with pytest.raises(UserError, match="hidden_act is 'relu'"):
        M3Config.from_json(document)
