"""The chunked loss against the same sum written with full logits, and its metrics."""

from dataclasses import replace

import pytest
import torch

from target_model.kernels import ops
from tests.draft_model.drafts import random_draft
from tests.fixtures import random_target
from tests.train.batches import random_features
from tests.train.naive import naive_loss, naive_unroll
from train.loss import LossSettings, StepSums, Teacher, count_rows, step_weights, ttt_loss
from train.ttt import unroll, valid_rows

STEPS, DECAY = 3, 0.8
DOCUMENTS = [[1] * 9 + [2] * 8 + [0] * 3, [1] * 20]
SPANS = [[0, 0, 1, 1, 1, 1, 0, 2, 2] + [0, 3, 3, 3, 3, 3, 3, 3] + [0] * 3, [0] * 6 + [1] * 14]


def case(pruned: bool):
    target = random_target()
    draft = random_draft(draft_vocab_size=100 if pruned else 300)
    features = random_features(draft.config, DOCUMENTS, SPANS, STEPS)
    kept = draft.target_ids(torch.arange(100)) if pruned else None
    return target, draft, features, Teacher(target.lm_head.weight, kept)


def chunked(draft, features, teacher, settings):
    rows = valid_rows(features.valid_steps, STEPS)
    states = unroll(draft, features, rows)
    weights = step_weights(count_rows(features.valid_steps, STEPS), DECAY)
    head = draft.lm_head.weight
    return ttt_loss(states, rows, head, features.final_state, features.valid_steps, weights, teacher, settings)


def counted_rows(features):
    """(r, row, step) -> position whose target distribution judges the row, from the rule itself."""
    counted = {}
    for r in range(2):
        for row in range(20):
            for step in range(STEPS):
                last = row + 2 + step
                if last >= 20 or len(set(DOCUMENTS[r][row : last + 1])) > 1:
                    continue
                spans = set(SPANS[r][row + 1 : last + 1])
                if len(spans) == 1 and spans != {0}:
                    counted[r, row, step] = last - 1
    return counted


@pytest.mark.parametrize("kind", ["kl", "lk"])
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("chunk_elements", [1, 1 << 14, 1 << 26])
def test_equals_full_logits_with_gradients(kind, pruned, chunk_elements):
    target, draft, features, teacher = case(pruned)
    draft.zero_grad()
    loss, _ = chunked(draft, features, teacher, LossSettings(kind, 3.0, chunk_elements))
    (2 * loss).backward()
    ours = {name: p.grad.clone() for name, p in draft.named_parameters()}
    draft.zero_grad()
    counted, normed, logits = {}, {}, {}
    for r in range(2):
        states = naive_unroll(draft, features.token_ids[r].tolist(), DOCUMENTS[r], features.aux[r], STEPS)
        normed |= {((r, row), step): state for (row, step), state in states.items()}
        logits |= {(r, position): target.logits(features.final_state[r, position]) for position in range(20)}
    for (r, row, step), position in counted_rows(features).items():
        counted[(r, row), step] = (r, position)
    expected = naive_loss(normed, counted, draft.lm_head.weight, logits, teacher.kept_ids, DECAY, kind)
    (2 * expected).backward()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=2e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_many_chunks_cost_the_heads_gradient_nothing():
    """Its sum over chunks is kept in fp32: added up in bf16, these few chunks add a third to the error."""
    target, draft, features, teacher = case(False)
    rows = valid_rows(features.valid_steps, STEPS)
    weights = step_weights(count_rows(features.valid_steps, STEPS), DECAY)
    generator = torch.Generator().manual_seed(3)
    states = [torch.randn(len(each), 64, generator=generator).bfloat16() for each in rows]

    def gradient(dtype: torch.dtype, chunk_elements: int) -> torch.Tensor:
        head = draft.lm_head.weight.detach().bfloat16().to(dtype).requires_grad_()
        final = features.final_state.bfloat16().to(dtype)
        judge = Teacher(teacher.head_WH.bfloat16().to(dtype), None)
        converted = [state.to(dtype) for state in states]
        settings = LossSettings("kl", 3.0, chunk_elements)
        ttt_loss(converted, rows, head, final, features.valid_steps, weights, judge, settings)[0].backward()
        return head.grad.double()

    exact = gradient(torch.float32, 1 << 26)
    whole, parts = ((gradient(torch.bfloat16, size) - exact).norm() for size in (1 << 26, 1))
    assert parts < 1.1 * whole < 0.02 * exact.norm()


@pytest.mark.parametrize("pruned", [False, True])
@torch.no_grad()
def test_metrics_are_those_of_a_recount(pruned):
    target, draft, features, teacher = case(pruned)
    # Biased towards the target's own answers, so that there are hits to count.
    draft.lm_head.weight.copy_(
        target.lm_head.weight if teacher.kept_ids is None else target.lm_head.weight[teacher.kept_ids]
    )
    rows = valid_rows(features.valid_steps, STEPS)
    flat = features.final_state.flatten(0, 1)
    generator = torch.Generator().manual_seed(3)
    states = [flat[r + 1 + k] + 0.7 * torch.randn(len(r), 64, generator=generator) for k, r in enumerate(rows)]
    weights = step_weights(count_rows(features.valid_steps, STEPS), DECAY)
    _, sums = ttt_loss(
        states, rows, draft.lm_head.weight, features.final_state, features.valid_steps, weights, teacher, LossSettings()
    )
    alive: dict[int, bool] = {}
    joint, alphas, counts = [0] * STEPS, [0.0] * STEPS, [0] * STEPS
    for step in range(STEPS):
        for i, row in enumerate(rows[step].tolist()):
            p = target.logits(flat[row + 1 + step]).softmax(-1)
            q = draft.lm_head(states[step][i]).softmax(-1)
            proposed = draft.target_ids(q.argmax())
            alive[row] = alive.get(row, True) and bool(proposed == p.argmax())
            joint[step] += alive[row]
            counts[step] += 1
            alphas[step] += float(torch.minimum(p if teacher.kept_ids is None else p[teacher.kept_ids], q).sum())
    assert sum(joint) > 5 and joint[0] < counts[0]
    metrics = sums.metrics()
    assert metrics["rows"] == counts
    assert metrics["tau_sim"] == pytest.approx(1 + sum(j / n for j, n in zip(joint, counts, strict=True)))
    assert metrics["step_alpha"] == pytest.approx([a / n for a, n in zip(alphas, counts, strict=True)], rel=1e-4)
    if pruned:
        assert max(metrics["step_alpha"]) < 1


def test_steps_without_rows_take_no_weight():
    weights = step_weights(torch.tensor([10, 5, 0]), 0.5)
    torch.testing.assert_close(weights, torch.tensor([1 / 10, 0.5 / 5, 0.0]) / 1.5)
    assert step_weights(torch.tensor([0, 0]), 0.8).tolist() == [0.0, 0.0]


def test_micro_batches_add_up_to_the_whole():
    """Row weights of the whole step: the sum over parts is the loss of the whole, whatever the split."""
    _, draft, features, teacher = case(False)
    weights = step_weights(count_rows(features.valid_steps, STEPS), DECAY)

    def part(rows: slice) -> tuple[torch.Tensor, StepSums]:
        cut = type(features)(*(x[rows] if isinstance(x, torch.Tensor) else x for x in vars(features).values()))
        chosen = valid_rows(cut.valid_steps, STEPS)
        head = draft.lm_head.weight
        states = unroll(draft, cut, chosen)
        return ttt_loss(states, chosen, head, cut.final_state, cut.valid_steps, weights, teacher, LossSettings())

    whole, first, second = part(slice(0, 2)), part(slice(0, 1)), part(slice(1, 2))
    torch.testing.assert_close(first[0] + second[0], whole[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close((first[1] + second[1]).loss, whole[1].loss, atol=1e-5, rtol=1e-5)


def test_a_batch_without_rows_is_zero_and_finite():
    _, draft, features, teacher = case(False)
    empty = type(features)(**(vars(features) | {"valid_steps": torch.zeros_like(features.valid_steps)}))
    loss, sums = chunked(draft, empty, teacher, LossSettings())
    loss.backward()
    assert float(loss.detach()) == 0 and sums.metrics()["tau_sim"] == 1
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in draft.parameters())


@pytest.mark.parametrize("chunk_elements", [1, 1 << 11])
def test_the_fused_kernel_is_what_training_uses(monkeypatch, chunk_elements):
    """Loss, sums and gradients of the Triton kernel (interpreted without a GPU) equal the reference's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, draft, features, _ = case(pruned=False)
    draft, head = draft.to(device), target.lm_head.weight.to(device)
    moved = {name: value.to(device) for name, value in vars(features).items() if isinstance(value, torch.Tensor)}
    features = replace(features, **moved)
    results = []
    calls = []
    for kind in ("reference", "triton"):
        monkeypatch.setattr(ops, "override", kind)
        real = ops.kl_rows
        monkeypatch.setattr(ops, "kl_rows", lambda *a, real=real, kind=kind: calls.append(kind) or real(*a))
        draft.zero_grad()
        loss, sums = chunked(draft, features, Teacher(head, None), LossSettings("kl", 3.0, chunk_elements))
        monkeypatch.undo()
        loss.backward()
        results.append([loss.detach(), *sums.tensors(), *(p.grad.clone() for p in draft.parameters())])
    assert {"reference", "triton"} == set(calls)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)
