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

from target_model.kernels.common import FLOATS, LOG2_E, PDL, begin, cdiv, launch_options, power_of_two, require_tensor

BITS = tl.constexpr(LOG2_E)  # exp(x) = exp2(BITS x)


@triton.jit
def _tile(logits, first, V, LANES: tl.constexpr, EACH: tl.constexpr):
    """fp32 [LANES, EACH] of one row from column `first` on (-inf behind its end), and the columns."""
    v = first + tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    return tl.load(logits + v, mask=v < V, other=float("-inf")).to(tl.float32), v


@triton.jit
def _next(x, v, top, best, total):
    """The running maximum of every lane, its first column, and the sum of exp(x - maximum), with one tile more; besides
    the tile's exponentials and what older sums are multiplied with.
    """
    tile_top = tl.max(x, 1)
    best = tl.where(tile_top > top, tl.min(tl.where(x == tile_top[:, None], v, 0x7FFFFFFF), 1), best)
    new_top = tl.maximum(top, tile_top)
    base = tl.where(new_top > float("-inf"), new_top, 0.0) * BITS
    decay = tl.exp2(top * BITS - base)
    exponentials = tl.exp2(x * BITS - base[:, None])
    return new_top, best, total * decay + tl.sum(exponentials, 1), exponentials, decay


@triton.jit
def _log_sum(top, best, total):
    """Joins the lanes: log-sum-exp, first column of the maximum, and each lane's weight in a sum."""
    highest = tl.max(top, 0)
    weight = tl.exp2((top - highest) * BITS)
    first = tl.min(tl.where(top == highest, best, 0x7FFFFFFF), 0)
    return highest + tl.log(tl.sum(total * weight, 0)), first, weight


@triton.jit
def _statistics(student, teacher, V, LANES: tl.constexpr, EACH: tl.constexpr):
    """Of one row of both: KL, log-sum-exps, whether both put the same token first (ties: the lower id). Every lane has
    sums of its own, moved to a new maximum once a tile and not once a number.
    """
    s_top = tl.full([LANES], float("-inf"), tl.float32)
    t_top = tl.full([LANES], float("-inf"), tl.float32)
    s_best = tl.zeros([LANES], tl.int32)
    t_best = tl.zeros([LANES], tl.int32)
    s_sum = tl.zeros([LANES], tl.float32)
    t_sum = tl.zeros([LANES], tl.float32)
    cross = tl.zeros([LANES], tl.float32)  # sum of exp(t - max) (t - s)
    for first in range(0, V, LANES * EACH):
        s, v = _tile(student, first, V, LANES, EACH)
        t, _ = _tile(teacher, first, V, LANES, EACH)
        s_top, s_best, s_sum, _, _ = _next(s, v, s_top, s_best, s_sum)
        t_top, t_best, t_sum, weight, decay = _next(t, v, t_top, t_best, t_sum)
        cross = cross * decay + tl.sum(tl.where(v < V, weight * (t - s), 0.0), 1)
    s_log, s_first, _ = _log_sum(s_top, s_best, s_sum)
    t_log, t_first, weight = _log_sum(t_top, t_best, t_sum)
    kl = tl.sum(cross * weight, 0) / tl.sum(t_sum * weight, 0) - t_log + s_log
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
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    c = tl.program_id(0)
    student += c.to(tl.int64) * V
    teacher += tl.load(teacher_rows + c) * V
    row_kl, s_log, t_log, hit = _statistics(student, teacher, V, LANES, EACH)
    tl.store(kl + c, row_kl)
    tl.store(hits + c, hit)
    row_weight = tl.load(weights + c)
    shared = tl.zeros([LANES], tl.float32)
    for first in range(0, V, LANES * EACH):
        s, v = _tile(student, first, V, LANES, EACH)
        t, _ = _tile(teacher, first, V, LANES, EACH)
        q = tl.exp2((s - s_log) * BITS)
        p = tl.exp2((t - t_log) * BITS)
        shared += tl.sum(tl.minimum(p, q), 1)
        if GRADIENT:
            tl.store(student + v, (row_weight * (q - p)).to(student.dtype.element_ty), mask=v < V)
    tl.store(alpha + c, tl.sum(shared, 0))


def kl_rows(
    student_CV: Tensor, teacher_AV: Tensor, teacher_rows_C: Tensor, weights_C: Tensor, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(kl and sum of min(p, q), fp32 [C]; int32 [C] hits) of rows of logits, the student's row c against the teacher's
    row teacher_rows[c] (int64). With `gradient` the student's logits are replaced by weight * (q - p).
    """
    rows, vocab = student_CV.shape
    require_tensor("student", student_CV, (None, None), FLOATS)
    require_tensor("teacher", teacher_AV, (None, vocab), FLOATS)
    require_tensor("teacher_rows", teacher_rows_C, (rows,), (torch.int64,))
    require_tensor("weights", weights_C, (rows,), (torch.float32,))
    kl, alpha = (torch.empty(rows, dtype=torch.float32, device=student_CV.device) for _ in range(2))
    hits = torch.empty(rows, dtype=torch.int32, device=student_CV.device)
    # A lane's eight numbers are sixteen bytes: one load of one thread.
    each = 8
    lanes = min(512, max(32, power_of_two(vocab) // each))
    if rows:
        kl_rows_kernel[(rows,)](
            student_CV, teacher_AV, teacher_rows_C, weights_C, kl, alpha, hits, vocab, GRADIENT=gradient, LANES=lanes,
            EACH=each, PDL=PDL, **launch_options(lanes // 32, 1),
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


@triton.jit
def scale_kernel(
    total,  # fp32 [count]
    factor,  # [] a float
    out,  # [count]
    count,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(total + i, mask=i < count, other=0.0, eviction_policy="evict_first")
    tl.store(out + i, (x * tl.load(factor)).to(out.dtype.element_ty), mask=i < count)


def scaled(total_MN: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 total * factor [] in another dtype: one pass, and no second fp32 copy of a head's size."""
    require_tensor("total", total_MN, (None,) * total_MN.dim(), (torch.float32,))
    require_tensor("factor", factor, (), FLOATS)
    out = torch.empty_like(total_MN, dtype=dtype)
    block = 4096
    if total_MN.numel():
        scale_kernel[(cdiv(total_MN.numel(), block),)](
            total_MN, factor, out, total_MN.numel(), BLOCK=block, PDL=PDL, **launch_options(8, 1)
        )
    return out


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, state_TH, head_VH, teacher_state_TG, teacher_head_VG, weights_T, chunk):
        rows = state_TH.shape[0]
        gradient = any(ctx.needs_input_grad[:2])
        measured = []
        state_grad = torch.empty_like(state_TH) if gradient else None
        head_grad = None
        for first in range(0, rows, chunk):
            part = slice(first, min(first + chunk, rows))
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
        head_grad = scaled(head_grad, grad_loss, ctx.head_dtype)
        return state_grad * grad_loss.to(state_grad.dtype), head_grad, None, None, None, None


def linear_kl(
    state_TH: Tensor,
    head_VH: Tensor,
    teacher_state_TG: Tensor,
    teacher_head_VG: Tensor,
    weights_T: Tensor,
    chunk: int = 2048,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(sum of weight * kl, differentiable in state and head; kl and sum of min(p, q) fp32 [T]; int32 [T] hits)."""
    rows, hidden = state_TH.shape
    require_tensor("state", state_TH, (None, None), FLOATS)
    require_tensor("head", head_VH, (None, hidden), (state_TH.dtype,))
    require_tensor("teacher_state", teacher_state_TG, (rows, None), FLOATS)
    require_tensor(
        "teacher_head", teacher_head_VG, (head_VH.shape[0], teacher_state_TG.shape[1]), (teacher_state_TG.dtype,)
    )
    require_tensor("weights", weights_T, (rows,), (torch.float32,))
    return _LinearKL.apply(state_TH, head_VH, teacher_state_TG, teacher_head_VG, weights_T, chunk)
