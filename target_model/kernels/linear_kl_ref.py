"""Reference of `linear_kl` and `kl_rows`. Shapes: T, C, A rows, H student width, G teacher width, V vocabulary."""

import torch
from torch import Tensor


def kl_rows(
    student_CV: Tensor, teacher_AV: Tensor, teacher_rows_C: Tensor, weights_C: Tensor, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(kl [C], sum of min(p, q) [C], int32 [C] hits); with `gradient` the student's logits become weight * (q - p)."""
    teacher_CV = teacher_AV[teacher_rows_C]
    log_q, log_p = student_CV.float().log_softmax(-1), teacher_CV.float().log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    kl, shared = (p * (log_p - log_q)).sum(-1), torch.minimum(p, q).sum(-1)
    hits = (student_CV.argmax(-1) == teacher_CV.argmax(-1)).int()
    if gradient:
        student_CV.copy_((q - p) * weights_C[:, None])
    return kl, shared, hits


def add_product(total_MN: Tensor | None, a_KM: Tensor, b_KN: Tensor) -> Tensor:
    """fp32 total + a.T @ b, in place; without a total the product alone."""
    product = a_KM.T @ b_KN
    return product.float() if total_MN is None else total_MN.add_(product)


def scaled(total_MN: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """total * factor in another dtype, in pieces that a GPU's cache holds: no second fp32 copy of a head's size."""
    out = torch.empty_like(total_MN, dtype=dtype)
    for whole, piece in zip(out.split(1024), total_MN.split(1024), strict=True):
        whole.copy_(piece * factor)
    return out


def linear_kl(
    state_TH: Tensor,
    head_VH: Tensor,
    teacher_state_TG: Tensor,
    teacher_head_VG: Tensor,
    weights_T: Tensor,
    chunk: int = 2048,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(sum of weight * kl, kl [T], sum of min(p, q) [T], int32 [T] hits), all at once: `chunk` is not used."""
    student_TV = (state_TH @ head_VH.T).float()
    teacher_TV = (teacher_state_TG @ teacher_head_VG.T).float()
    log_q, log_p = student_TV.log_softmax(-1), teacher_TV.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    shared = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
    hits = (student_TV.argmax(-1) == teacher_TV.argmax(-1)).int()
    return (weights_T * kl).sum(), kl.detach(), shared.detach(), hits
