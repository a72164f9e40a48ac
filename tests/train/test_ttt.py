"""The unrolled draft against its definition, its masks, and the served draft."""

from dataclasses import replace

import pytest
import torch

from target_model.batch import Batch
from target_model.cache import PagedCache
from target_model.errors import UserError
from tests.draft_model.drafts import random_draft
from tests.fixtures import random_target
from tests.train.batches import random_features
from tests.train.naive import naive_unroll
from train.attention import Segments, explicit_attention, flash_attention
from train.features import Features
from train.ttt import unroll, valid_rows

STEPS = 4
# Two packed documents and padding; a row of one document. Prompts (0) between supervised spans.
DOCUMENTS = [[1] * 9 + [2] * 8 + [0] * 3, [1] * 20]
SPANS = [[0, 0, 1, 1, 1, 1, 0, 2, 2] + [0, 3, 3, 3, 3, 3, 3, 3] + [0] * 3, [0] * 6 + [1] * 14]
SWITCHES = [
    {},
    {"fc_norm": False, "norm_output": False},
    {"norm_before_residual": True, "attention_bias": True, "num_kv_heads": 2},
]


def unrolled(draft, features, attention="explicit"):
    rows = valid_rows(features.valid_steps, STEPS)
    return rows, unroll(draft, features, rows, attention)


@pytest.mark.parametrize("attention", ["explicit", "flash"])
@pytest.mark.parametrize("switches", SWITCHES)
@torch.no_grad()
def test_equals_the_definition(switches, attention):
    draft = random_draft(**switches)
    features = random_features(draft.config, DOCUMENTS, SPANS, STEPS)
    rows, states = unrolled(draft, features, attention)
    length = len(DOCUMENTS[0])
    for r in range(2):
        expected = naive_unroll(draft, features.token_ids[r].tolist(), DOCUMENTS[r], features.aux[r], STEPS)
        for step in range(STEPS):
            mine = [(i, row - r * length) for i, row in enumerate(rows[step].tolist()) if row // length == r]
            assert mine
            for i, row in mine:
                torch.testing.assert_close(states[step][i], expected[row, step], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("own", [0, 3])
def test_flash_and_explicit_have_the_same_gradients(packed, own):
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 20, 4, 16), (2, 20, 2, 16), (2, 20, 2, 16)] + [(2, 20, 2, 16)] * (2 * own)
    documents = torch.tensor(DOCUMENTS)
    results = []
    for attend in (explicit_attention, flash_attention):
        generator.manual_seed(1)
        q, k, v, *rest = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
        out = attend(q, k, v, rest[:own], rest[own:], documents, packed, 0.25)
        (out * torch.randn(out.shape, generator=generator)).sum().backward()
        results.append([out, *(tensor.grad for tensor in (q, k, v, *rest))])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-4)


def changed_rows(draft, features: Features, other: Features, attention: str) -> set[tuple[int, int, int]]:
    """(row of the batch, position, step) of the states that differ between two batches of the same layout."""
    rows, first = unrolled(draft, features, attention)
    _, second = unrolled(draft, other, attention)
    length = features.token_ids.shape[1]
    return {
        (row // length, row % length, step)
        for step in range(STEPS)
        for i, row in enumerate(rows[step].tolist())
        if not torch.equal(first[step][i], second[step][i])
    }


@pytest.mark.parametrize("attention", ["explicit", "flash"])
@torch.no_grad()
def test_nothing_leaks(attention):
    """A future token, padding, the other document and the other row change nothing that they must not reach."""
    draft = random_draft()
    features = random_features(draft.config, DOCUMENTS, SPANS, STEPS)

    def perturbed(r: int, position: int) -> set[tuple[int, int, int]]:
        ids, aux = features.token_ids.clone(), features.aux.clone()
        ids[r, position] = (ids[r, position] + 7) % draft.config.vocab_size
        aux[r, position] += 1
        return changed_rows(draft, features, replace(features, token_ids=ids, aux=aux), attention)

    assert perturbed(0, 18) == set()  # padding
    inside = perturbed(0, 4)
    assert inside and all(r == 0 and position < 9 for r, position, _ in inside)  # not the second document, not row 1
    second = perturbed(0, 13)
    assert second and all(r == 0 and 9 <= position < 17 for r, position, _ in second)
    # Row p of step k reads tokens up to p + 1 + k and taps up to p.
    for position in (10, 15, 18):
        changed = perturbed(1, position)
        assert changed and all(r == 1 and p + 1 + step >= position for r, p, step in changed)
    assert perturbed(1, 19) == set()  # only ever a label


@pytest.mark.parametrize("switches", SWITCHES)
@torch.no_grad()
def test_the_served_draft_sees_the_same(switches):
    """Same features, norms, positions: paged serving steps from a root equal the unrolled rows of that root."""
    target = random_target()
    draft = random_draft(**switches)
    ids = torch.randint(0, 300, (1, 40))
    final, aux = target.capture(ids, draft.config.taps)
    positions = torch.arange(40)[None]
    known = (39 - positions).clamp(0, STEPS)
    features = Features(ids, torch.ones_like(ids), positions, known, aux, final, packed=False)
    rows, states = unrolled(draft, features)
    root = 29
    page, tokens = target.config.block_size, ids[0].tolist()
    cache = PagedCache(target.config, 8, dtype=torch.float32, device="cpu", draft=draft.kv_shape)
    table = [[5, 2, 7, 0, 3, 1]]
    prefill = Batch.causal(page, "cpu", [tokens[1 : root + 1]], [1], table)
    state = draft(prefill, draft.project(aux[0, :root]), cache.draft())
    # Row p of the training is slot p + 1 of the cache: all of the prefix agrees, not only the root.
    torch.testing.assert_close(draft.norm(state), states[0][:root], atol=2e-5, rtol=1e-4)
    state = state[-1:]
    for step in range(1, STEPS):
        slot = root + step
        mask = [(1 << step) - 1]
        batch = Batch.build(page, "cpu", [[tokens[slot]]], [root + 1], table, [slot], [slot], mask)
        state = draft(batch, draft.next_feature(state), cache.draft())
        expected = states[step][rows[step].tolist().index(root - 1)]
        torch.testing.assert_close(draft.norm(state)[0], expected, atol=2e-5, rtol=1e-4)
        logits = draft.logits(state)
        torch.testing.assert_close(logits[0], draft.lm_head(expected), atol=1e-4, rtol=1e-4)


def test_unknown_attention_is_an_error_of_the_configuration():
    from train.config import parse_config

    with pytest.raises(UserError, match=r"ttt\.attention"):
        parse_config({"name": "x", "data": {"path": "x"}, "schedule": {"steps": 1}, "ttt": {"attention": "magic"}})


def test_recomputing_the_layer_gives_the_same_gradients_and_keeps_less():
    draft = random_draft()
    features = random_features(draft.config, [[1] * 20], [[1] * 20], STEPS)
    rows = valid_rows(features.valid_steps, STEPS)
    results, kept = [], []
    for recompute in (False, True):
        draft.zero_grad()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.numel()) or x, lambda x: x):
            states = unroll(draft, features, rows, recompute=recompute)
        sum(state.square().sum() for state in states).backward()
        results.append([p.grad.clone() for p in draft.parameters() if p.grad is not None])
        kept.append(sum(saved))
    assert kept[1] < 0.6 * kept[0]
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_segments_are_the_runs_of_equal_documents():
    documents = torch.tensor([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1], [1, 2, 3, 3, 0, 0]])
    segments = Segments.of(documents)
    assert segments.starts.tolist() == [0, 2, 5, 6, 12, 13, 14, 16, 18] and segments.longest == 6
    assert segments.starts.dtype == torch.int32
