"""Linear + KL divergence for training: student and teacher heads, softmax, loss and gradient, in chunks of rows.

    kl[t] = sum_v p[v] (log p[v] - log q[v]),  p = softmax(teacher state . teacher head),  q = softmax(state . head)
    loss = sum_t weight[t] kl[t];  d loss / d student logits = weight (q - p)
T rows, H student width, G teacher width, V vocabulary, C rows of a chunk. Products run in the matrix library; between
them one kernel reads both logits of a chunk (one program a row, online sums) and overwrites the student's with the
gradient. [T, V] never exists, only [C, V]. Gradients are made in the forward pass: nothing is computed twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from target_model.kernels.common import FLOATS, PDL, launch_options, power_of_two, require_tensor


@triton.jit
def _statistics(student, teacher, V, BLOCK: tl.constexpr):
    """Of one row of both: KL, log-sum-exps, whether both put the same token first (ties: the lower id). Every lane
    keeps online sums of its own columns; they are joined at the end.
    """
    i = tl.arange(0, BLOCK)
    s_max = tl.full([BLOCK], float("-inf"), tl.float32)
    t_max = tl.full([BLOCK], float("-inf"), tl.float32)
    s_best = tl.zeros([BLOCK], tl.int32)
    t_best = tl.zeros([BLOCK], tl.int32)
    s_sum = tl.zeros([BLOCK], tl.float32)
    t_sum = tl.zeros([BLOCK], tl.float32)
    cross = tl.zeros([BLOCK], tl.float32)  # sum of exp(t - max) (t - s)
    for first in range(0, V, BLOCK):
        v = first + i
        s = tl.load(student + v, mask=v < V, other=float("-inf")).to(tl.float32)
        t = tl.load(teacher + v, mask=v < V, other=float("-inf")).to(tl.float32)
        s_best = tl.where(s > s_max, v, s_best)
        t_best = tl.where(t > t_max, v, t_best)
        s_new = tl.maximum(s_max, s)
        t_new = tl.maximum(t_max, t)
        s_base = tl.where(s_new > float("-inf"), s_new, 0.0)
        t_base = tl.where(t_new > float("-inf"), t_new, 0.0)
        decay = tl.exp(t_max - t_base)
        weight = tl.exp(t - t_base)
        s_sum = s_sum * tl.exp(s_max - s_base) + tl.exp(s - s_base)
        t_sum = t_sum * decay + weight
        cross = cross * decay + tl.where(v < V, weight * (t - s), 0.0)
        s_max = s_new
        t_max = t_new
    s_top = tl.max(s_max, 0)
    t_top = tl.max(t_max, 0)
    t_scale = tl.exp(t_max - t_top)
    t_total = tl.sum(t_sum * t_scale, 0)
    s_log = s_top + tl.log(tl.sum(s_sum * tl.exp(s_max - s_top), 0))
    t_log = t_top + tl.log(t_total)
    kl = tl.sum(cross * t_scale, 0) / t_total - t_log + s_log
    s_first = tl.min(tl.where(s_max == s_top, s_best, 0x7FFFFFFF), 0)
    t_first = tl.min(tl.where(t_max == t_top, t_best, 0x7FFFFFFF), 0)
    return kl, s_log, t_log, (s_first == t_first).to(tl.int32)


@triton.jit
def kl_rows_kernel(
    student,  # [C, V] logits, replaced by weight * (q - p) with GRADIENT
    teacher,  # [A, V] logits
    teacher_rows,  # int64 [C] the teacher's row for each of the student's
    weights,  # fp32 [C]
    kl,  # fp32 [C]
    alpha,  # fp32 [C] sum of min(p, q)
    hits,  # int32 [C]
    V,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    c = tl.program_id(0)
    student += c.to(tl.int64) * V
    teacher += tl.load(teacher_rows + c) * V
    row_kl, s_log, t_log, hit = _statistics(student, teacher, V, BLOCK)
    tl.store(kl + c, row_kl)
    tl.store(hits + c, hit)
    if GRADIENT:
        row_weight = tl.load(weights + c)
        shared = tl.zeros([BLOCK], tl.float32)
        for first in range(0, V, BLOCK):
            v = first + tl.arange(0, BLOCK)
            s = tl.load(student + v, mask=v < V, other=float("-inf")).to(tl.float32)
            t = tl.load(teacher + v, mask=v < V, other=float("-inf")).to(tl.float32)
            q = tl.exp(s - s_log)
            p = tl.exp(t - t_log)
            shared += tl.minimum(p, q)
            tl.store(student + v, (row_weight * (q - p)).to(student.dtype.element_ty), mask=v < V)
        tl.store(alpha + c, tl.sum(shared, 0))


def kl_rows(
    student_CV: Tensor, teacher_AV: Tensor, teacher_rows_C: Tensor, weights_C: Tensor, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(kl, sum of min(p, q), 0 without `gradient`, both fp32 [C]; int32 [C] hits) of rows of logits, the student's row
    c against the teacher's row teacher_rows[c] (int64). With `gradient` the student's logits are replaced by
    weight * (q - p).
    """
    rows, vocab = student_CV.shape
    require_tensor("student", student_CV, (None, None), FLOATS)
    require_tensor("teacher", teacher_AV, (None, vocab), FLOATS)
    require_tensor("teacher_rows", teacher_rows_C, (rows,), (torch.int64,))
    require_tensor("weights", weights_C, (rows,), (torch.float32,))
    kl, alpha = (torch.zeros(rows, dtype=torch.float32, device=student_CV.device) for _ in range(2))
    hits = torch.zeros(rows, dtype=torch.int32, device=student_CV.device)
    block = min(4096, power_of_two(vocab))
    if rows:
        kl_rows_kernel[(rows,)](
            student_CV, teacher_AV, teacher_rows_C, weights_C, kl, alpha, hits, vocab, GRADIENT=gradient, BLOCK=block,
            PDL=PDL, **launch_options(16 if block == 4096 else 4, 1),
        )  # fmt: skip
    return kl, alpha, hits


def add_product(total_MN: Tensor | None, a_KM: Tensor, b_KN: Tensor) -> Tensor:
    """fp32 total + a.T @ b, in place; without a total the product alone. In half precision on CUDA the product adds to
    the fp32 sum by itself: one product after the other would round to bf16 and pass over the sum once more.
    """
    if not a_KM.is_cuda or a_KM.dtype == torch.float32:
        product = a_KM.T @ b_KN
        return product.float() if total_MN is None else total_MN.add_(product)
    if total_MN is None:
        return torch.mm(a_KM.T, b_KN, out_dtype=torch.float32)
    return torch.addmm(total_MN, a_KM.T, b_KN, out_dtype=torch.float32, out=total_MN)


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, state_TH, head_VH, teacher_state_TG, teacher_head_VG, weights_T, chunk):
        rows = state_TH.shape[0]
        gradient = any(ctx.needs_input_grad[:2])
        measured = []
        state_grad = torch.empty_like(state_TH) if gradient else None
        head_grad = None
        for begin in range(0, rows, chunk):
            part = slice(begin, min(begin + chunk, rows))
            student = state_TH[part] @ head_VH.T
            teacher = teacher_state_TG[part] @ teacher_head_VG.T
            same = torch.arange(len(student), device=student.device)
            measured.append(kl_rows(student, teacher, same, weights_T[part], gradient))
            if gradient:
                torch.mm(student, head_VH, out=state_grad[part])
                head_grad = add_product(head_grad, student, state_TH[part])
        ctx.save_for_backward(*([state_grad, head_grad] if gradient else []))
        ctx.head_dtype = head_VH.dtype
        kl, alpha, hits = (torch.cat(parts) for parts in zip(*measured, strict=True))
        ctx.mark_non_differentiable(kl, alpha, hits)
        return (weights_T * kl).sum(), kl, alpha, hits

    @staticmethod
    def backward(ctx, grad_loss, *_):
        state_grad, head_grad = ctx.saved_tensors
        # Written once, in its final dtype: there is no second fp32 copy of a gradient of the head's size.
        scaled = torch.mul(head_grad, grad_loss, out=torch.empty_like(head_grad, dtype=ctx.head_dtype))
        return state_grad * grad_loss.to(state_grad.dtype), scaled, None, None, None, None


def linear_kl(
    state_TH: Tensor,
    head_VH: Tensor,
    teacher_state_TG: Tensor,
    teacher_head_VG: Tensor,
    weights_T: Tensor,
    chunk: int = 2048,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(sum of weight * kl, differentiable in state and head; kl fp32 [T]; sum of min(p, q) fp32 [T], 0 without
    gradient; int32 [T] hits)."""
    rows, hidden = state_TH.shape
    require_tensor("state", state_TH, (None, None), FLOATS)
    require_tensor("head", head_VH, (None, hidden), (state_TH.dtype,))
    require_tensor("teacher_state", teacher_state_TG, (rows, None), FLOATS)
    require_tensor(
        "teacher_head", teacher_head_VG, (head_VH.shape[0], teacher_state_TG.shape[1]), (teacher_state_TG.dtype,)
    )
    require_tensor("weights", weights_T, (rows,), (torch.float32,))
    return _LinearKL.apply(state_TH, head_VH, teacher_state_TG, teacher_head_VG, weights_T, chunk)
