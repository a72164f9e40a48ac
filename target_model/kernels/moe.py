"""Router and experts of a mixture of experts. The kernels are in moe_router.py and moe_gemm.py.

Shapes: T rows, H hidden, E experts, I expert width, N experts of a token.
"""

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


def plan(experts_TN: Tensor, experts: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Pairs grouped by expert: places [tiles * block_m] (-1 empty) and the expert of each tile (-1 unused)."""
    pairs = experts_TN.numel()
    tiles = pairs // block_m + min(experts, pairs)
    order = torch.empty(tiles * block_m, dtype=torch.int32, device=experts_TN.device)
    tile_expert = torch.empty(tiles, dtype=torch.int32, device=experts_TN.device)
    plan_kernel[(experts,)](
        experts_TN, order, tile_expert, pairs, tiles, E=experts, E_PAD=power_of_two(experts + 1), BLOCK_M=block_m,
        CHUNK=min(1024, max(32, power_of_two(pairs))), PDL=PDL, **launch_options(4, 1),
    )  # fmt: skip
    return order, tile_expert


def gemm_shape(pairs: int, experts: int, form: str = "none") -> dict:
    """The tile for this many pairs: room for half as many tokens again as an expert gets on average, so that few need a
    second tile."""
    block_m = min(128, max(16, power_of_two(cdiv(pairs * 3, experts * 2))))
    if block_m == 128:
        return {"block_m": 128, "block_w": 128, "block_k": 64, "num_warps": 8, "num_stages": 3}
    if block_m >= 32:
        return {"block_m": block_m, "block_w": 128, "block_k": 64, "num_warps": 4, "num_stages": 3}
    return {"block_m": block_m, "block_w": 64, "block_k": 128, "num_warps": 4, "num_stages": 3}


def grouped_experts(
    x_TH: Tensor,
    w13_E2IH: Tensor,
    w2_EHI: Tensor,
    weights_TN: Tensor,
    experts_TN: Tensor,
    alpha: float,
    limit: float,
    beta: float,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    routed_over: int | None = None,
) -> Tensor:
    """The weighted sum of each row's experts, [T, H]. A pair whose expert is not here has the id E and the weight 0;
    the tiles suit pairs spread over `routed_over` experts (None: E).

    With scales (uint8 E8M0, one for 32 values of a row: [E, 2I, H / 32] and [E, H, I / 32]) the weights are MXFP8
    (e4m3, full shape) or MXFP4 (uint8, two values a byte, low nibble first: [E, 2I, H / 2] and [E, H, I / 2]).
    """
    shape = gemm_shape(experts_TN.numel(), routed_over or w2_EHI.shape[0], weight_format(w13_E2IH, w13_scale))
    return run_experts(
        x_TH,
        w13_E2IH,
        w2_EHI,
        weights_TN,
        experts_TN,
        alpha,
        limit,
        beta,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        **shape,
    )


def weight_format(weights: Tensor, scale: Tensor | None) -> str:
    """The kernels' name of the weights' format."""
    if scale is None:
        return "none"
    formats = {torch.uint8: "e2m1", torch.float8_e4m3fn: "e4m3"}
    require(
        weights.dtype in formats, f"scaled weights must be uint8 (MXFP4) or float8_e4m3fn (MXFP8), not {weights.dtype}"
    )
    return formats[weights.dtype]


def run_experts(
    x_TH: Tensor,
    w13_E2IH: Tensor,
    w2_EHI: Tensor,
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
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
) -> Tensor:
    """`grouped_experts` with a given tile: `block_m` tokens x `block_w` weight rows, `block_k` at a time."""
    rows, hidden = x_TH.shape
    form = weight_format(w13_E2IH, w13_scale)
    pack = 2 if form == "e2m1" else 1
    experts, width = w2_EHI.shape[0], w2_EHI.shape[2] * pack
    per_token = experts_TN.shape[1]
    require_tensor("x", x_TH, (None, None), FLOATS)
    dtype = x_TH.dtype if form == "none" else w13_E2IH.dtype
    require_tensor("w13", w13_E2IH, (experts, 2 * width, hidden // pack), (dtype,))
    require_tensor("w2", w2_EHI, (experts, hidden, width // pack), (dtype,))
    if form != "none":
        require(x_TH.dtype == torch.bfloat16, f"microscaled weights need bf16 tokens, not {x_TH.dtype}")
        require_tensor("w13_scale", w13_scale, (experts, 2 * width, hidden // 32), (torch.uint8,))
        require_tensor("w2_scale", w2_scale, (experts, hidden, width // 32), (torch.uint8,))
        w13_E2IH, w2_EHI = w13_E2IH.view(torch.uint8), w2_EHI.view(torch.uint8)
    require_tensor("weights", weights_TN, (rows, per_token), (torch.float32,))
    require_tensor("experts", experts_TN, (rows, per_token), (torch.int64,))
    order, tile_expert = plan(experts_TN, experts, block_m)
    tiles = tile_expert.shape[0]
    act = torch.empty(tiles * block_m, width, dtype=x_TH.dtype, device=x_TH.device)
    y = torch.empty(rows * per_token, hidden, dtype=x_TH.dtype, device=x_TH.device)
    options = launch_options(num_warps, num_stages)
    up_kernel[(cdiv(width, block_w // 2), tiles)](
        x_TH, w13_E2IH, w13_E2IH if w13_scale is None else w13_scale, order, tile_expert, act, alpha, limit, beta,
        H=hidden, I=width, N=per_token, BLOCK_M=block_m,
        BLOCK_I=block_w // 2, BLOCK_K=block_k, FORMAT=form, UPCAST=INTERPRETED, PDL=PDL, **options,
    )  # fmt: skip
    down_kernel[(cdiv(hidden, block_w), tiles)](
        act, w2_EHI, w2_EHI if w2_scale is None else w2_scale, order, tile_expert, y, H=hidden, I=width,
        BLOCK_M=block_m, BLOCK_H=block_w, BLOCK_K=block_k, FORMAT=form,
        UPCAST=INTERPRETED, PDL=PDL, **options,
    )  # fmt: skip
    out = torch.empty(rows, hidden, dtype=x_TH.dtype, device=x_TH.device)
    weighted_sum_kernel[(rows, cdiv(hidden, 1024))](
        y, weights_TN, out, H=hidden, N=per_token, BLOCK_H=1024, PDL=PDL, **launch_options(4, 1)
    )
    return out
