"""The operations of target and draft that have kernels, and the one place that chooses an implementation.

Triton on CUDA, the plain PyTorch reference elsewhere. The environment variable SPEC_KERNELS (`triton` or `reference`)
overrules that; tests set `override` instead. Both kinds have the same names and signatures: `x.py` beside `x_ref.py`,
where each is documented.

Shapes: T rows, Q query heads, K kv heads, J index heads, D head dim, P pages, B slots in a page, N chosen blocks or
experts, E experts, I expert width, H hidden.
"""

import functools
import importlib
import os
from types import ModuleType

import torch
from torch import Tensor

from target_model.batch import Batch
from target_model.errors import UserError
from target_model.quantised import QuantisedWeight

# So many rows at most share a launch with the expert that all of them pass.
FEW_ROWS = 64

override: str | None = os.environ.get("SPEC_KERNELS")


def _implementation(module: str, operand: Tensor) -> ModuleType:
    choice = override or ("triton" if operand.is_cuda else "reference")
    return _module(module, choice)


@functools.cache
def _module(module: str, choice: str) -> ModuleType:
    if choice not in ("triton", "reference"):
        raise UserError(f"SPEC_KERNELS must be triton or reference, not {choice!r}")
    return importlib.import_module(f"target_model.kernels.{module}" + ("" if choice == "triton" else "_ref"))


def add_norm(x_TH: Tensor, residual_TH: Tensor, scale_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(RMS norm of x + residual times scale, x + residual)."""
    return _implementation("norms", x_TH).add_norm(x_TH, residual_TH, scale_H, eps)


def dual_norm(first_TH: Tensor, second_TH: Tensor, first_scale_H: Tensor, second_scale_H: Tensor, eps: float) -> Tensor:
    """Both inputs RMS-normalised, side by side: [T, 2H]."""
    return _implementation("norms", first_TH).dual_norm(first_TH, second_TH, first_scale_H, second_scale_H, eps)


def norm_rope_write(
    packed_TnD: Tensor,
    scale_nD: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    rotary_dim: int,
    eps: float,
    num_heads: int,
    k_pool_PBKD: Tensor,
    v_pool_PBKD: Tensor,
    index_pool_PBD: Tensor | None,
    index_heads: int,
    batch: Batch,
) -> tuple[Tensor, Tensor | None]:
    """Normalised, rotated queries [T, Q, D] and index queries [T, J, D]; keys and values go to their slots."""
    kernel = _implementation("norm_rope", packed_TnD).norm_rope_write
    return kernel(
        packed_TnD,
        scale_nD,
        cos_TD,
        sin_TD,
        rotary_dim,
        eps,
        num_heads,
        k_pool_PBKD,
        v_pool_PBKD,
        index_pool_PBD,
        index_heads,
        batch,
    )


def rope_write(
    packed_TnD: Tensor,
    frequencies_F: Tensor,
    num_heads: int,
    k_pool_PBKD: Tensor,
    v_pool_PBKD: Tensor,
    batch: Batch,
) -> Tensor:
    """Rotated queries [T, Q, D] of packed heads q | k | v; keys and values go to their slots."""
    kernel = _implementation("rope_write", packed_TnD).rope_write
    return kernel(packed_TnD, frequencies_F, num_heads, k_pool_PBKD, v_pool_PBKD, batch)


def rotate_heads(
    packed_TnD: Tensor, positions_T: Tensor, frequencies_F: Tensor, num_heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [T, Q, D] and keys and the values [T, K, D] of packed heads q | k | v, differentiable."""
    kernel = _implementation("rotate_heads", packed_TnD).rotate_heads
    return kernel(packed_TnD, positions_T, frequencies_F, num_heads, kv_heads)


def silu_product(gate_up_TI: Tensor) -> Tensor:
    """silu(gate) * up, [T, 2I] -> [T, I], differentiable."""
    return _implementation("silu_product", gate_up_TI).silu_product(gate_up_TI)


def write_kv(k_TKD: Tensor, v_TKD: Tensor, k_pool_PBKD: Tensor, v_pool_PBKD: Tensor, batch: Batch) -> None:
    """Stores the rows' keys and values in their slots."""
    _implementation("write_kv", k_TKD).write_kv(k_TKD, v_TKD, k_pool_PBKD, v_pool_PBKD, batch)


def write_index_k(index_k_TD: Tensor, pool_PBD: Tensor, batch: Batch) -> None:
    """Stores the rows' index keys in their slots."""
    _implementation("write_kv", index_k_TD).write_index_k(index_k_TD, pool_PBD, batch)


def paged_attention(
    q_TQD: Tensor, k_pool_PBKD: Tensor, v_pool_PBKD: Tensor, batch: Batch, scale: float, first_slot: int = 0
) -> Tensor:
    """Softmax attention over the visible keys in slots >= first_slot, [T, Q, D]."""
    kernel = _implementation("paged_attention", q_TQD).paged_attention
    return kernel(q_TQD, k_pool_PBKD, v_pool_PBKD, batch, scale, first_slot)


def select_blocks(
    index_q_TJD: Tensor, index_k_pool_PBD: Tensor, batch: Batch, top_k: int, init_blocks: int, local_blocks: int
) -> Tensor:
    """The blocks each row's index heads choose: int32 [T, J, top_k], ascending, -1 behind the last."""
    kernel = _implementation("select_blocks", index_q_TJD).select_blocks
    return kernel(index_q_TJD, index_k_pool_PBD, batch, top_k, init_blocks, local_blocks)


def sparse_attention(
    q_TQD: Tensor,
    k_pool_PBKD: Tensor,
    v_pool_PBKD: Tensor,
    blocks_TKN: Tensor,
    batch: Batch,
    scale: float,
    first_slot: int = 0,
    scratch_chosen: bool = True,
) -> Tensor:
    """Softmax attention over the visible keys in slots >= first_slot of the chosen blocks, and of all scratch keys
    without `scratch_chosen`, [T, Q, D].
    """
    kernel = _implementation("sparse_attention", q_TQD).sparse_attention
    return kernel(q_TQD, k_pool_PBKD, v_pool_PBKD, blocks_TKN, batch, scale, first_slot, scratch_chosen)


def route(x_TH: Tensor, gate_EH: Tensor, bias_E: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Weights fp32 [T, N], which sum to `scale`, and ids int64 [T, N] of each row's experts."""
    return _implementation("moe", x_TH).route(x_TH, gate_EH, bias_E, top_k, scale)


def grouped_experts(
    x_TH: Tensor,
    w13_E2IH: Tensor | QuantisedWeight,
    w2_EHI: Tensor | QuantisedWeight,
    weights_TN: Tensor,
    experts_TN: Tensor,
    alpha: float,
    limit: float,
    beta: float,
    routed_over: int | None = None,
    shared: tuple[Tensor | QuantisedWeight, Tensor | QuantisedWeight] | None = None,
) -> Tensor:
    """The weighted sum of each row's experts, [T, H]. A pair whose expert is not here has the id E and the weight 0;
    `routed_over` is the number of experts then, those elsewhere included. `shared`: w13 and w2 of an expert whose
    output every row adds.
    """
    form = _form(x_TH, w13_E2IH, w2_EHI)
    module = _module("moe", "reference") if form == "mixed" else _implementation("moe", x_TH)
    routing = (weights_TN, experts_TN, alpha, limit, beta)
    if shared is None:
        return module.grouped_experts(x_TH, w13_E2IH, w2_EHI, *routing, routed_over=routed_over)
    # One more expert in the same launch, where it looks like the others and has about as many rows.
    alike = [weight.shape for weight in shared] == [w13_E2IH.shape[1:], w2_EHI.shape[1:]]
    if form == "packed" and alike and _form(x_TH, w13_E2IH, *shared) == "packed" and len(x_TH) <= FEW_ROWS:
        return module.grouped_experts(x_TH, w13_E2IH, w2_EHI, *routing, routed_over=routed_over, shared=shared)
    routed = module.grouped_experts(x_TH, w13_E2IH, w2_EHI, *routing, routed_over=routed_over)
    return routed + mlp(x_TH, *shared, alpha, limit, beta)


def linear(x_TK: Tensor, weight_NK: Tensor | QuantisedWeight) -> Tensor:
    """x times a weight: [T, N]."""
    if _form(x_TK, weight_NK) == "packed":
        return _implementation("packed_products", x_TK).linear(x_TK, weight_NK)
    return _module("packed_products", "reference").linear(x_TK, weight_NK)


def mlp(
    x_TH: Tensor,
    w13_2IH: Tensor | QuantisedWeight,
    w2_HI: Tensor | QuantisedWeight,
    alpha: float,
    limit: float,
    beta: float,
) -> Tensor:
    """w2 swiglu(w13 x): [T, H]."""
    packed = _form(x_TH, w13_2IH, w2_HI) == "packed"
    module = _implementation("packed_products", x_TH) if packed else _module("packed_products", "reference")
    return module.mlp(x_TH, w13_2IH, w2_HI, alpha, limit, beta)


def _form(x_TK: Tensor, *weights: Tensor | QuantisedWeight) -> str:
    """What the kernels tell apart: `plain` weights, `packed` ones of one format with bf16 rows, and `mixed` ones."""
    formats = {weight.form if isinstance(weight, QuantisedWeight) else None for weight in weights}
    if formats == {None}:
        return "plain"
    return "packed" if len(formats) == 1 and x_TK.dtype == torch.bfloat16 else "mixed"


def linear_kl(
    state_TH: Tensor, head_VH: Tensor, teacher_state_TG: Tensor, teacher_head_VG: Tensor, weights_T: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weighted KL of student against teacher distribution, with gradient; see linear_kl.py."""
    kernel = _implementation("linear_kl", state_TH).linear_kl
    return kernel(state_TH, head_VH, teacher_state_TG, teacher_head_VG, weights_T)


def kl_rows(
    student_CV: Tensor, teacher_AV: Tensor, teacher_rows_C: Tensor, weights_C: Tensor, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """KL, overlap and hits of rows of logits; the student's become their gradient. See linear_kl.py."""
    kernel = _implementation("linear_kl", student_CV).kl_rows
    return kernel(student_CV, teacher_AV, teacher_rows_C, weights_C, gradient)


def merge_column(
    q_NQD: Tensor, part_NQD: Tensor, lse_NQ: Tensor, keys: list[Tensor], values: list[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """Attention over other keys with that over a column of keys of the row's own merged in. See own_column.py."""
    return _implementation("own_column", q_NQD).merge_column(q_NQD, part_NQD, lse_NQ, keys, values, scale)


def column_gradient(
    grad_NQD: Tensor,
    q_NQD: Tensor,
    out_NQD: Tensor,
    lse_NQ: Tensor,
    dq_NQD: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    scale: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the column's keys and values; that of q is added to `dq`."""
    kernel = _implementation("own_column", q_NQD).column_gradient
    return kernel(grad_NQD, q_NQD, out_NQD, lse_NQ, dq_NQD, keys, values, scale)


def add_product(total_MN: Tensor | None, a_KM: Tensor, b_KN: Tensor) -> Tensor:
    """fp32 total + a.T @ b, in place; without a total the product alone."""
    return _implementation("linear_kl", a_KM).add_product(total_MN, a_KM, b_KN)


def scaled(total_MN: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """total * factor in another dtype."""
    return _implementation("linear_kl", total_MN).scaled(total_MN, factor, dtype)


def sample_tokens(
    logits_NV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    choice_R: Tensor,
    position_N: Tensor,
) -> Tensor:
    """Filters, Gumbel noise and argmax of every row: int64 [N]. Each setting is for N / R consecutive rows."""
    kernel = _implementation("sample_tokens", logits_NV).sample_tokens
    return kernel(logits_NV, temperature_R, top_k_R, top_p_R, min_p_R, seed_R, choice_R, position_N)


def gumbel_at(seed_R: Tensor, choice_R: Tensor, position_R: Tensor, ids_NK: Tensor) -> Tensor:
    """Standard Gumbel noise of the tokens ids[n, :], fp32 [N, K]. Each of the R keys is for N / R consecutive rows."""
    return _implementation("gumbel", ids_NK).gumbel_at(seed_R, choice_R, position_R, ids_NK)


def top_rows(x_NV: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best k <= 64 entries of every row, [N, k] each: values in descending order and columns, ties to the lower
    column; and log sum exp of the row, [N].
    """
    return _implementation("top_rows", x_NV).top_rows(x_NV, k)


def noisy_top_rows(
    x_NV: Tensor,
    k: int,
    scale_R: Tensor,
    seed_R: Tensor,
    choice_R: Tensor,
    position_R: Tensor,
    tokens_V: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`top_rows` of x * scale + the Gumbel noise of the columns' tokens, by default their numbers."""
    kernel = _implementation("top_rows", x_NV).noisy_top_rows
    return kernel(x_NV, k, scale_R, seed_R, choice_R, position_R, tokens_V)


def commit_rows(k_LPBKD: Tensor, v_LPBKD: Tensor, index_SPBD: Tensor, path_RM: Tensor, batch: Batch) -> None:
    """Moves the cache rows of accepted nodes behind the root, in every layer."""
    _implementation("commit_rows", k_LPBKD).commit_rows(k_LPBKD, v_LPBKD, index_SPBD, path_RM, batch)
