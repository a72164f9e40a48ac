"""Loss of all TTT steps against the target's distribution, in chunks: logits of [tokens, vocabulary] never exist.

R rows, S tokens, T = R * S flattened, H hidden, V draft vocabulary, W target vocabulary; C rows of a chunk, A labels of
it. Row p of step k predicts x[p + 2 + k], for which the target's distribution comes from its final state at p + 1 + k.
So the states of all steps that share a label share one teacher distribution. A chunk is the rows of all steps whose
labels lie in one range: one teacher product, one student product, one pass over the head's gradient.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from target_model.kernels import ops


@dataclass(frozen=True)
class Teacher:
    """The frozen target's output head. `kept_ids` int64 [V]: target ids of a pruned draft vocabulary, else None."""

    head_WH: Tensor
    kept_ids: Tensor | None

    def logits(self, state_CH: Tensor) -> Tensor:
        """The target's own, [C, W], in the head's precision."""
        return torch.nn.functional.linear(state_CH, self.head_WH)

    def distribution(self, state_CH: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """log p over the draft's vocabulary, renormalised [C, V]; target's argmax [C]; log of the kept mass [C, 1]."""
        logits_CW = self.logits(state_CH).float()
        best_C = logits_CW.argmax(-1)
        if self.kept_ids is None:
            return logits_CW.log_softmax(-1), best_C, None
        total = logits_CW.logsumexp(-1, keepdim=True)
        kept = logits_CW[:, self.kept_ids]
        mass = kept.logsumexp(-1, keepdim=True)
        return kept - mass, best_C, mass - total


@dataclass
class StepSums:
    """Sums over the valid rows of one or more micro batches, by TTT step; fp64 [steps] on the device.

    hits: the draft's best token is the target's best; joint: hits at this and all earlier steps of the row.
    """

    rows: Tensor
    loss: Tensor
    alpha: Tensor
    hits: Tensor
    joint: Tensor

    def __add__(self, other: "StepSums") -> "StepSums":
        return StepSums(*(a + b for a, b in zip(self.tensors(), other.tensors(), strict=True)))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.rows, self.loss, self.alpha, self.hits, self.joint)

    def metrics(self) -> dict[str, float | list[float]]:
        """tau_sim, loss by step, alpha by step, accuracy by step given that all earlier steps hit."""
        rows, loss, alpha, _, joint = (tensor.tolist() for tensor in self.tensors())
        share = [j / max(n, 1) for j, n in zip(joint, rows, strict=True)]
        # Rows thin out towards the end of a span: joint hits of step k are a share of the rows that have a step k.
        return {
            "tau_sim": 1 + sum(share),
            "step_loss": [a / max(n, 1) for a, n in zip(loss, rows, strict=True)],
            "step_alpha": [a / max(n, 1) for a, n in zip(alpha, rows, strict=True)],
            "step_accuracy": [
                now / before if before else 0.0 for now, before in zip(share, [1.0, *share], strict=False)
            ],
            "rows": rows,
        }


def step_weights(counts: Tensor, decay: float) -> Tensor:
    """fp32 [steps]: a row's weight w_k / N_k / sum of w, w_k = decay^k; steps without rows are left out."""
    counts = counts.double()
    weights = decay ** torch.arange(len(counts), dtype=torch.float64, device=counts.device)
    weights = torch.where(counts > 0, weights, 0.0)
    return (weights / counts.clamp(min=1) / weights.sum().clamp(min=1e-30)).float()


def count_rows(valid_steps: Tensor, steps: int) -> Tensor:
    """N_k: rows that count at each step. int64 [steps]."""
    return torch.bincount(valid_steps.flatten(), minlength=steps + 1).flip(0).cumsum(0).flip(0)[1 : steps + 1]


@dataclass(frozen=True)
class LossSettings:
    """What a row's loss is.

    kl: KL(p || q). lk: w * KL + (1 - w) * (1 - alpha), alpha = sum min(p, q), w = exp(-eta * alpha) without gradient.
    Under a pruned vocabulary the KL uses p renormalised over the kept tokens, alpha the true p.
    with_alpha: alpha is measured also when the loss does not need it.
    """

    kind: Literal["kl", "lk"] = "kl"
    eta: float = 3.0
    chunk_elements: int = 1 << 26
    with_alpha: bool = True


@dataclass
class _Plan:
    """What the fused function needs beside the differentiable tensors."""

    final_state_TH: Tensor
    valid_steps_T: Tensor
    rows: list[Tensor]
    weights: Tensor
    teacher: Teacher
    settings: LossSettings
    sums: StepSums | None = None


def ttt_loss(
    normed_states: list[Tensor],
    rows: list[Tensor],
    head_VH: Tensor,
    final_state: Tensor,
    valid_steps: Tensor,
    weights: Tensor,
    teacher: Teacher,
    settings: LossSettings,
) -> tuple[Tensor, StepSums]:
    """Sum over steps k and their rows of weights[k] * loss(row): fp32 scalar, and the sums for metrics.

    normed_states: [M_k, H] a step, of the flat `rows` [M_k] that count; final_state [R, S, target H]; valid_steps int64
    [R, S]; weights fp32 [steps] (see `step_weights`). Gradients of states and head are made in the forward pass, chunk
    by chunk.
    """
    plan = _Plan(final_state.flatten(0, 1), valid_steps.flatten(), rows, weights, teacher, settings)
    return _ChunkedLoss.apply(plan, head_VH, *normed_states), plan.sums


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: _Plan, head_VH: Tensor, *states_MH: Tensor) -> Tensor:
        ctx.need_head, ctx.need_states = ctx.needs_input_grad[1], any(ctx.needs_input_grad[2:])
        grads = [torch.zeros_like(state) for state in states_MH] if ctx.need_states else []
        head_grad = torch.zeros_like(head_VH, dtype=torch.float32) if not len(plan.rows[0]) else None
        hits = torch.zeros(len(states_MH), len(plan.valid_steps_T), dtype=torch.bool, device=head_VH.device)
        sums = torch.zeros(2, len(states_MH), dtype=torch.float64, device=head_VH.device)
        fused = plan.settings.kind == "kl" and plan.teacher.kept_ids is None
        measure = _fused_rows if fused else _rows
        for chunk in _chunks(plan, head_VH, fused):
            final = plan.final_state_TH[chunk.labels]
            teacher = (plan.teacher.logits(final),) if fused else plan.teacher.distribution(final)
            state = torch.cat([state[part] for state, part in zip(states_MH, chunk.parts, strict=True)])
            logits = torch.nn.functional.linear(state, head_VH)
            row_loss, alpha, hit, grad = measure(logits, teacher, chunk, plan, ctx.need_head or ctx.need_states)
            del logits, teacher
            counts = [part.stop - part.start for part in chunk.parts]
            for measured, total in ((row_loss, sums[0]), (alpha, sums[1])):
                if measured is not None:
                    total += torch.stack([part.sum(dtype=torch.float64) for part in measured.split(counts)])
            for step, (part, rows) in enumerate(zip(hit.split(counts), chunk.parts, strict=True)):
                hits[step, plan.rows[step][rows]] = part
            if ctx.need_states:
                for whole, part, rows in zip(grads, (grad @ head_VH).split(counts), chunk.parts, strict=True):
                    whole[rows] = part
            if ctx.need_head:
                head_grad = ops.add_product(head_grad, grad, state)
        plan.sums = _step_sums(plan.valid_steps_T, hits, sums)
        ctx.save_for_backward(*([head_grad] if ctx.need_head else []), *grads)
        ctx.head_dtype = head_VH.dtype
        return (sums[0].float() * plan.weights).sum()

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        saved, head = list(ctx.saved_tensors), None
        if ctx.need_head:
            head = ops.scaled(saved.pop(0), grad_loss, ctx.head_dtype)
        states = [grad * grad_loss.to(grad.dtype) for grad in saved]
        return None, head, *(states if ctx.need_states else [None] * (len(ctx.needs_input_grad) - 2))


@dataclass(frozen=True)
class _Chunk:
    """Rows of all steps whose labels lie in one range. labels: places in the flat states of the A labels' positions;
    parts: a range of each step's rows; label_rows: which of the A labels each row has, int64 [C]; weights fp32 [C].
    """

    labels: Tensor
    parts: list[slice]
    label_rows: Tensor
    weights: Tensor


def _chunks(plan: _Plan, head_VH: Tensor, fused: bool) -> Iterator[_Chunk]:
    """Row a that counts at step 0 has the label x[a + 2], and so has row a - step at `step`. Rows ascend, and so do
    their labels: those of a range of labels are a range.
    """
    first, steps = plan.rows[0], len(plan.rows)
    # Logits of a label: the teacher's and those of every step. The general form holds several copies in fp32.
    width = (1 + steps) * max(head_VH.shape[0], plan.teacher.head_WH.shape[0]) * (1 if fused else 4)
    size = max(1, plan.settings.chunk_elements // width)
    starts = list(range(0, len(first), size))
    edges = torch.tensor([*starts, len(first)], device=first.device)
    labels = [torch.searchsorted(first, rows + step) for step, rows in enumerate(plan.rows)]
    bounds = torch.stack([torch.searchsorted(places, edges) for places in labels]).tolist()
    for number, start in enumerate(starts):
        parts = [slice(*bound[number : number + 2]) for bound in bounds]
        label_rows = torch.cat([places[part] for places, part in zip(labels, parts, strict=True)]) - start
        weights = [weight.expand(part.stop - part.start) for weight, part in zip(plan.weights, parts, strict=True)]
        yield _Chunk(first[start : start + size] + 1, parts, label_rows, torch.cat(weights))


def _fused_rows(
    logits_CV: Tensor, teacher: tuple[Tensor], chunk: _Chunk, plan: _Plan, need_grad: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """As `_rows`, for the plain KL over the whole vocabulary: on CUDA one kernel, and the gradient takes the place of
    the logits.
    """
    kl, alpha, hits = ops.kl_rows(logits_CV, teacher[0], chunk.label_rows, chunk.weights, need_grad)
    return kl, alpha, hits.bool(), logits_CV if need_grad else None


def _rows(
    logits_CV: Tensor, teacher: tuple[Tensor | None, ...], chunk: _Chunk, plan: _Plan, need_grad: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """(loss [C], alpha [C] or None, hit [C], weight * d loss / d logits [C, V] or None)."""
    picked = [part if part is None else part[chunk.label_rows] for part in teacher]
    *measured, grad = _row_losses(logits_CV, *picked, plan.teacher.kept_ids, plan.settings, need_grad)
    return *measured, None if grad is None else (grad * chunk.weights[:, None]).to(logits_CV.dtype)


def _row_losses(
    logits_CV: Tensor,
    log_p_CV: Tensor,
    best_C: Tensor,
    log_mass_C1: Tensor | None,
    target_of_draft: Tensor | None,
    settings: LossSettings,
    need_grad: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """(loss [C], alpha [C] or None, hit [C], d loss / d logits [C, V] or None), all closed forms in fp32."""
    log_q = logits_CV.float().log_softmax(-1)
    best = logits_CV.argmax(-1)
    hit = (best if target_of_draft is None else target_of_draft[best]) == best_C
    p, alpha = log_p_CV.exp(), None
    loss = (p * (log_p_CV - log_q)).sum(-1)
    lk = settings.kind == "lk"
    q = log_q.exp() if need_grad or lk or settings.with_alpha else None
    if lk or settings.with_alpha:
        true_p = p if log_mass_C1 is None else p * log_mass_C1.exp()
        alpha = torch.minimum(true_p, q).sum(-1)
    grad = q - p if need_grad else None
    if lk:
        weight = torch.exp(-settings.eta * alpha)
        loss = weight * loss + (1 - weight) * (1 - alpha)
        if need_grad:
            below = q * (q < true_p)
            grad = weight[:, None] * grad - (1 - weight[:, None]) * (below - q * below.sum(-1, keepdim=True))
    return loss, alpha, hit, grad


def _step_sums(valid_steps_T: Tensor, hits: Tensor, sums: Tensor) -> StepSums:
    steps = len(hits)
    valid = valid_steps_T > torch.arange(steps, device=hits.device)[:, None]
    alive = hits.int().cumprod(0).bool() & valid

    def count(flags: Tensor) -> Tensor:
        return flags.sum(-1, dtype=torch.float64)

    return StepSums(count(valid), sums[0], sums[1], count(hits & valid), count(alive))
