"""Router and experts of a mixture of experts. The kernels are in moe_router.py and moe_gemm.py, and moe_widen.py says
how packed weights are read.

Shapes: T rows, H hidden, E experts, I expert width, N experts of a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from target_model.kernels.common import (
    FLOATS,
    INTERPRETED,
    PDL,
    cdiv,
    launch_options,
    power_of_two,
    require,
    require_tensor,
)
from target_model.kernels.moe_gemm import down_kernel, up_kernel, weighted_sum_kernel
from target_model.kernels.moe_router import logits_kernel, plan_kernel, route_kernel
from target_model.kernels.moe_widen import numbers_per_word
from target_model.quantised import QuantisedWeight


def route(x_TH: Tensor, gate_EH: Tensor, bias_E: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Weights fp32 [T, N], which sum to `scale`, and ids int64 [T, N] of each row's experts."""
    rows, hidden = x_TH.shape
    experts = gate_EH.shape[0]
    require_tensor("x", x_TH, (None, None), FLOATS)
    require_tensor("gate", gate_EH, (None, hidden), (torch.float32,))
    require_tensor("bias", bias_E, (experts,), (torch.float32,))
    require(top_k <= experts, f"{top_k} of {experts} experts")
    tiles = cdiv(rows, 16) * cdiv(experts, 32)
    splits = min(16, cdiv(hidden, 64), max(1, power_of_two(264 // tiles + 1) // 2))
    partial = torch.empty(splits, rows, experts, dtype=torch.float32, device=x_TH.device)
    logits_kernel[(cdiv(rows, 16), cdiv(experts, 32), splits)](
        x_TH, gate_EH, partial, rows, H=hidden, E=experts, BLOCK_T=16, BLOCK_E=32, BLOCK_H=64, SPLITS=splits,
        UPCAST=INTERPRETED, PDL=PDL, **launch_options(4, 3),
    )  # fmt: skip
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=x_TH.device)
    chosen = torch.empty(rows, top_k, dtype=torch.int64, device=x_TH.device)
    route_kernel[(rows,)](
        partial, bias_E, weights, chosen, rows, scale, E=experts, E_PAD=power_of_two(experts), N=top_k,
        N_PAD=power_of_two(top_k), SPLITS=splits, PDL=PDL, **launch_options(1, 1),
    )  # fmt: skip
    return weights, chosen


@dataclass(frozen=True)
class Operand:
    """A weight as the kernels read it: numbers, or int16 words of packed numbers, with their scales.

    form, group and row are the kernels' FORMAT, GROUP and ROW. What a format lacks is a tensor that is not read.
    """

    values: Tensor
    scale: Tensor
    row_scale: Tensor
    form: str = "none"
    group: int = 0
    row: str = ""

    @property
    def per(self) -> int:
        """Numbers in an element of `values`."""
        return numbers_per_word(self.form)

    @property
    def constants(self) -> dict:
        """Launch keywords."""
        return {"FORMAT": self.form, "GROUP": self.group, "ROW": self.row, "UPCAST": INTERPRETED, "PDL": PDL}


def operand(weight: Tensor | QuantisedWeight, x: Tensor) -> Operand:
    """A weight that is to be multiplied with x."""
    if isinstance(weight, Tensor):
        require_tensor("weight", weight, (None,) * weight.dim(), (x.dtype,))
        return Operand(weight, weight, weight)
    require(x.dtype == torch.bfloat16, f"packed weights need bf16 rows, not {x.dtype}")
    form, scale = weight.form, weight.scale
    words = weight.values.view(torch.int16)
    name = "e2m1" if form.per_byte == 2 else "e4m3"
    if not form.group:
        return Operand(words, words, scale, name, 0, "multiply")
    row_scale = words if weight.tensor_scale is None else weight.tensor_scale
    return Operand(words, scale.view(torch.uint8), row_scale, name, form.group, form.tensor_scale)


def plan(
    experts_TN: Tensor, experts: int, block_m: int, x_TH: Tensor, block_k: int, per: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs grouped by expert: places [tiles * block_m] (-1 empty) and the expert of each tile (-1 unused); and x for
    weights of `per` numbers a word (x itself for 1).
    """
    pairs, hidden = experts_TN.numel(), x_TH.shape[1]
    tiles = pairs // block_m + min(experts, pairs)
    order = torch.empty(tiles * block_m, dtype=torch.int32, device=experts_TN.device)
    tile_expert = torch.empty(tiles, dtype=torch.int32, device=experts_TN.device)
    padded = hidden if per == 1 else cdiv(hidden, block_k) * block_k
    arranged = x_TH if per == 1 else x_TH.new_empty(x_TH.shape[0], padded)
    chunks = 0 if per == 1 else x_TH.shape[0] * cdiv(padded, 1024)
    plan_kernel[(experts + chunks,)](
        experts_TN, order, tile_expert, x_TH, arranged, pairs, tiles, E=experts, E_PAD=power_of_two(experts + 1),
        BLOCK_M=block_m, CHUNK=min(1024, max(32, power_of_two(pairs))), H=hidden, HP=padded, PER=per, BLOCK_K=block_k,
        PDL=PDL, **launch_options(4, 1),
    )  # fmt: skip
    return order, tile_expert, arranged


def gemm_shape(pairs: int, experts: int, form: str = "none") -> dict:
    """The tile for this many pairs: room for half as many tokens again as an expert gets on average, so that few need a
    second tile."""
    block_m = min(128, max(16, power_of_two(cdiv(pairs * 3, experts * 2))))
    if form == "none":
        if block_m == 128:
            return {"block_m": 128, "block_w": 128, "block_k": 64, "num_warps": 8, "num_stages": 3}
        if block_m >= 32:
            return {"block_m": block_m, "block_w": 128, "block_k": 64, "num_warps": 4, "num_stages": 3}
        return {"block_m": block_m, "block_w": 64, "block_k": 128, "num_warps": 4, "num_stages": 3}
    block_k = 256 if form == "e2m1" else 128
    if pairs <= experts // 8:
        return {"block_m": 8, "block_w": 64, "block_k": block_k, "num_warps": 4, "num_stages": 4}
    if block_m < 32:
        return {"block_m": block_m, "block_w": 64, "block_k": block_k, "num_warps": 4, "num_stages": 4}
    if block_m < 128:
        return {"block_m": block_m, "block_w": 128, "block_k": 128, "num_warps": 4, "num_stages": 3}
    return {"block_m": 128, "block_w": 128, "block_k": 128, "num_warps": 8, "num_stages": 3}


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
) -> Tensor:
    """The weighted sum of each row's experts, [T, H]. A pair whose expert is not here has the id E and the weight 0;
    the tiles suit pairs spread over `routed_over` experts (None: E). Both weights are in the same format.
    """
    form = operand(w13_E2IH, x_TH).form
    shape = gemm_shape(experts_TN.numel(), routed_over or w2_EHI.shape[0], form)
    return run_experts(x_TH, w13_E2IH, w2_EHI, weights_TN, experts_TN, alpha, limit, beta, **shape)


def run_experts(
    x_TH: Tensor,
    w13_E2IH: Tensor | QuantisedWeight,
    w2_EHI: Tensor | QuantisedWeight,
    weights_TN: Tensor,
    experts_TN: Tensor,
    alpha: float,
    limit: float,
    beta: float,
    *,
    block_m: int,
    block_w: int,
    block_k: int,
    num_warps: int,
    num_stages: int,
) -> Tensor:
    """`grouped_experts` with a given tile: `block_m` tokens x `block_w` weight rows, `block_k` at a time."""
    rows, hidden = x_TH.shape
    experts, per_token = w2_EHI.shape[0], experts_TN.shape[1]
    require_tensor("x", x_TH, (None, None), FLOATS)
    require_tensor("weights", weights_TN, (rows, per_token), (torch.float32,))
    require_tensor("experts", experts_TN, (rows, per_token), (torch.int64,))
    w13, w2 = operand(w13_E2IH, x_TH), operand(w2_EHI, x_TH)
    order, tile_expert, arranged = plan(experts_TN, experts, block_m, x_TH, block_k, w13.per)
    y = two_products(
        arranged, w13, w2, rows * per_token, (hidden, w2_EHI.shape[2]), (alpha, limit, beta), per_token, order,
        tile_expert, block_m=block_m, block_w=block_w, block_k=block_k, options=launch_options(num_warps, num_stages),
    )  # fmt: skip
    out = torch.empty(rows, hidden, dtype=x_TH.dtype, device=x_TH.device)
    weighted_sum_kernel[(rows, cdiv(hidden, 1024))](
        y, weights_TN, out, H=hidden, N=per_token, BLOCK_H=1024, PDL=PDL, **launch_options(4, 1)
    )
    return out


def two_products(
    x: Tensor,
    w13: Operand,
    w2: Operand,
    pairs: int,
    sizes: tuple[int, int],
    activation: tuple[float, float, float],
    per_token: int,
    order: Tensor | None,
    tile_expert: Tensor | None,
    *,
    block_m: int,
    block_w: int,
    block_k: int,
    options: dict,
) -> Tensor:
    """Both products for all pairs, [pairs, H]. `sizes` is (H, I); x is in the order of the products; without a plan all
    rows go to the only expert.
    """
    hidden, width = sizes
    planned = order is not None
    tiles = tile_expert.shape[0] if planned else cdiv(pairs, block_m)
    require_tensor(
        "w13", w13.values, (None,) * (w13.values.dim() - 2) + (2 * width, hidden // w13.per), (w13.values.dtype,)
    )
    require_tensor("w2", w2.values, (None,) * (w2.values.dim() - 2) + (hidden, width // w2.per), (w13.values.dtype,))
    require((w13.form, w13.group, w13.row) == (w2.form, w2.group, w2.row), "w13 and w2 are in different formats")
    padded = width if w13.per == 1 else cdiv(width, block_k) * block_k
    act = x.new_empty(tiles * block_m, padded)
    y = x.new_empty(pairs, hidden)
    plan_or_none = (order, tile_expert) if planned else (y, y)
    up_kernel[(cdiv(padded, block_w // 2), tiles)](
        x, w13.values, w13.scale, w13.row_scale, *plan_or_none, act, pairs, *activation, H=hidden, I=width,
        HP=x.shape[1], IP=padded, N=per_token, BLOCK_M=block_m, BLOCK_I=block_w // 2, BLOCK_K=block_k, PLANNED=planned,
        **w13.constants, **options,
    )  # fmt: skip
    down_kernel[(cdiv(hidden, block_w), tiles)](
        act, w2.values, w2.scale, w2.row_scale, *plan_or_none, y, pairs, H=hidden, I=width, IP=padded, BLOCK_M=block_m,
        BLOCK_H=block_w, BLOCK_K=block_k, PLANNED=planned, **w2.constants, **options,
    )  # fmt: skip
    return y
