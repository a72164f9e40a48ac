"""Router and experts of a mixture of experts. The kernels are in moe_router.py, moe_gemm.py and, for packed experts of
some dozens of rows each, moe_wide.py; moe_widen.py says how packed weights are read.

Shapes: T rows, H hidden, E experts, I expert width, N experts of a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from target_model.kernels import moe_wide
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
from target_model.kernels.moe_widen import ARRANGED_AT_ONCE, arrange_kernel, numbers_per_word
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
        AHEAD=splits > 1 and hidden % (64 * splits) == 0, UPCAST=INTERPRETED, PDL=PDL, **launch_options(4, 3),
    )  # fmt: skip
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=x_TH.device)
    chosen = torch.empty(rows, top_k, dtype=torch.int64, device=x_TH.device)
    route_kernel[(rows,)](
        partial, bias_E, weights, chosen, rows, scale, E=experts, E_PAD=power_of_two(experts), N=top_k,
        N_PAD=power_of_two(top_k), SPLITS=splits, PDL=PDL, **launch_options(1, 1),
    )  # fmt: skip
    return weights, chosen


Weight = Tensor | QuantisedWeight


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
    def format(self) -> tuple[str, int, str]:
        """What weights of one launch have in common."""
        return self.form, self.group, self.row

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments of a kernel."""
        return self.values, self.scale, self.row_scale

    @property
    def constants(self) -> dict:
        """Launch keywords."""
        return {"FORMAT": self.form, "GROUP": self.group, "ROW": self.row}


@dataclass(frozen=True)
class Tile:
    """`block_m` tokens x `block_w` weight rows, `block_k` columns at a time; `separate` sums for the planes of packed
    weights; `registers` a thread may have at most; `wide`: the kernel of moe_wide.py."""

    block_m: int
    block_w: int
    block_k: int
    num_warps: int
    num_stages: int
    separate: bool = False
    registers: int | None = None
    wide: bool = False

    @property
    def run(self) -> int:
        """RUN of moe_widen.py: four warps share a matrix unit's instructions where the tile is large enough."""
        return 2 if self.num_warps % 4 == 0 and self.block_w >= 64 and self.block_m >= 16 else 4

    @property
    def order(self) -> dict:
        """Launch keywords on the order of the products."""
        return {"BLOCK_K": self.block_k, "RUN": self.run}


def operand(weight: Weight, x: Tensor) -> Operand:
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
    experts_TN: Tensor, experts: int, x_TH: Tensor, tile: Tile, w13: Operand, shared13: Operand | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs grouped by expert: places [tiles * block_m] (-1 empty) and the expert of each tile (-1 unused); and x in
    the order of the products (wide tiles: as it is). With a shared expert every row has one pair more, of expert number
    `experts`.
    """
    shared = shared13 is not None
    ahead = shared and shared13.values.shape[-1] % 8 == 0  # whole 16 bytes
    hidden = x_TH.shape[1]
    pairs, experts = experts_TN.numel() + shared * len(experts_TN), experts + shared
    tiles = pairs // tile.block_m + min(experts, pairs)
    order = torch.empty(tiles * tile.block_m, dtype=torch.int32, device=experts_TN.device)
    tile_expert = torch.empty(tiles, dtype=torch.int32, device=experts_TN.device)
    per = 1 if tile.wide else w13.per
    arranged, chunks = room_for(x_TH, tile, per)
    plan_kernel[(experts + chunks,)](
        experts_TN, order, tile_expert, x_TH, arranged, (shared13 or w13).values, pairs, tiles, E=experts,
        E_PAD=power_of_two(experts + 1), N=experts_TN.shape[1], SHARED=shared, BLOCK_M=tile.block_m,
        CHUNK=min(1024, max(32, power_of_two(pairs))), H=hidden, HP=arranged.shape[1], PER=per,
        ARRANGED=ARRANGED_AT_ONCE, SHARED_ROWS=w13.values.shape[-2], WORDS=w13.values.shape[-1], AHEAD=ahead, PDL=PDL,
        **tile.order, **launch_options(4, 1),
    )  # fmt: skip
    return order, tile_expert, arranged


def room_for(x_TH: Tensor, tile: Tile, per: int) -> tuple[Tensor, int]:
    """Where x goes in the order of the products, and the number of chunks to be moved there; x itself for plain
    weights."""
    rows, hidden = x_TH.shape
    if per == 1:
        return x_TH, 0
    padded = cdiv(hidden, tile.block_k) * tile.block_k
    return x_TH.new_empty(rows, padded), rows * cdiv(padded, ARRANGED_AT_ONCE)


def arrange(x_TH: Tensor, tile: Tile, per: int) -> Tensor:
    """x in the order of the products."""
    out, chunks = room_for(x_TH, tile, per)
    arrange_kernel[(chunks,)](
        x_TH, out, H=x_TH.shape[1], HP=out.shape[1], PER=per, BLOCK=ARRANGED_AT_ONCE, PDL=PDL, **tile.order,
        **launch_options(4, 1),
    )  # fmt: skip
    return out


def gemm_shape(pairs: int, experts: int, form: str = "none") -> Tile:
    """The tile for this many pairs: room for half as many tokens again as an expert gets on average, so that few need a
    second tile."""
    block_m = min(128, max(16, power_of_two(cdiv(pairs * 3, experts * 2))))
    if form == "none":
        if block_m == 128:
            return Tile(128, 128, 64, num_warps=8, num_stages=3)
        if block_m >= 32:
            return Tile(block_m, 128, 64, num_warps=4, num_stages=3)
        return Tile(block_m, 64, 128, num_warps=4, num_stages=3)
    if block_m == 16 and form == "e4m3":
        return Tile(16, 64, 256, num_warps=4, num_stages=4)
    if pairs <= experts // 32:  # one token: twice as many programs, which all run at once
        return Tile(8, 32, 512, num_warps=2, num_stages=3, separate=True)
    if block_m == 16 and pairs <= experts // 4:
        return Tile(8, 64, 512, num_warps=4, num_stages=3, separate=True)
    if block_m == 16:
        return Tile(8, 64, 256, num_warps=4, num_stages=4, separate=True)
    if block_m == 128:
        return Tile(128, 128, 128, num_warps=8, num_stages=3)
    if form == "e4m3":
        return Tile(block_m, 64, 128, num_warps=4, num_stages=4)
    return Tile(block_m, 64, 256, num_warps=4, num_stages=3)


def wide_shape(form: str) -> Tile:
    """The tile of moe_wide.py."""
    block_k = moe_wide.STEP_WORDS * numbers_per_word(form)
    return Tile(moe_wide.TILE_ROWS, 256, block_k, num_warps=8, num_stages=moe_wide.STAGES[form], wide=True)


def grouped_experts(
    x_TH: Tensor,
    w13_E2IH: Weight,
    w2_EHI: Weight,
    weights_TN: Tensor,
    experts_TN: Tensor,
    alpha: float,
    limit: float,
    beta: float,
    routed_over: int | None = None,
    shared: tuple[Weight, Weight] | None = None,
) -> Tensor:
    """The weighted sum of each row's experts, [T, H]. A pair whose expert is not here has the id E and the weight 0;
    the tiles suit pairs spread over `routed_over` experts (None: E). `shared`: w13 [2I, H] and w2 [H, I] of an expert
    that every row passes with the weight 1; then all others are here. All weights are in the same format.
    """
    w13 = operand(w13_E2IH, x_TH)
    tile = gemm_shape(experts_TN.numel(), routed_over or w2_EHI.shape[0], w13.form)
    some = tile.block_m == 64 or (tile.block_m == 32 and w13.form == "e4m3")
    if shared is None and some and moe_wide.serves(w13.format, *w2_EHI.shape[1:], x_TH.device):
        tile = wide_shape(w13.form)
    return run_experts(x_TH, w13_E2IH, w2_EHI, weights_TN, experts_TN, alpha, limit, beta, shared=shared, tile=tile)


def run_experts(
    x_TH: Tensor,
    w13_E2IH: Weight,
    w2_EHI: Weight,
    weights_TN: Tensor,
    experts_TN: Tensor,
    alpha: float,
    limit: float,
    beta: float,
    *,
    tile: Tile,
    shared: tuple[Weight, Weight] | None = None,
) -> Tensor:
    """`grouped_experts` with a given tile."""
    rows, hidden = x_TH.shape
    experts, per_token = w2_EHI.shape[0], experts_TN.shape[1]
    require_tensor("x", x_TH, (None, None), FLOATS)
    require_tensor("weights", weights_TN, (rows, per_token), (torch.float32,))
    require_tensor("experts", experts_TN, (rows, per_token), (torch.int64,))
    w13, w2 = operand(w13_E2IH, x_TH), operand(w2_EHI, x_TH)
    common = () if shared is None else tuple(operand(weight, x_TH) for weight in shared)
    order, tile_expert, arranged = plan(experts_TN, experts, x_TH, tile, w13, *common[:1])
    all_per_token = per_token + (shared is not None)
    if tile.wide:
        check_weights((w13, w2), hidden)
        y = moe_wide.two_products(arranged, order, tile_expert, w13.tensors[:2], w2.tensors[:2], w13.form, per_token,
                                  (alpha, limit, beta))  # fmt: skip
    else:
        y = two_products(arranged, (w13, w2, *common), rows * all_per_token, hidden, (alpha, limit, beta), tile,
                         all_per_token, (order, tile_expert))  # fmt: skip
    out = torch.empty(rows, hidden, dtype=x_TH.dtype, device=x_TH.device)
    weighted_sum_kernel[(rows, cdiv(hidden, 1024))](
        y, weights_TN, out, H=hidden, N=per_token, SPLITS=1, SHARED=shared is not None, BLOCK_H=1024, PDL=PDL,
        **launch_options(4, 1),
    )  # fmt: skip
    return out


def check_weights(operands: tuple[Operand, ...], hidden: int) -> tuple[int, int]:
    """Whether all weights fit one another; the width of an expert and the number of experts."""
    w13, w2 = operands[:2]
    shared13, shared2 = operands[2:] or (w13, w2)
    width, experts = w2.values.shape[-1] * w2.per, w2.values.shape[0]
    for name, up, down, leading in (("w13", w13, w2, w13.values.shape[:-2]), ("shared", shared13, shared2, ())):
        if len(operands) > 2 or name == "w13":
            require_tensor(name, up.values, (*leading, 2 * width, hidden // up.per), (w13.values.dtype,))
            require_tensor(name, down.values, (*leading, hidden, width // up.per), (w13.values.dtype,))
            require(up.format == down.format == w13.format, f"{name}: {up.format}, {down.format} and {w13.format}")
    return width, experts


def two_products(
    x: Tensor,
    operands: tuple[Operand, ...],
    pairs: int,
    hidden: int,
    activation: tuple[float, float, float],
    tile: Tile,
    per_token: int = 1,
    planned: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Both products for all pairs, [pairs, H]. x is in the order of the products; `operands` are w13 and w2, and those
    of the shared expert where there is one. Without a plan all rows go to one expert [2I, H].
    """
    w13, w2 = operands[:2]
    shared13, shared2 = operands[2:] or (w13, w2)
    width, experts = check_weights(operands, hidden)
    padded = width if w13.per == 1 else cdiv(width, tile.block_k) * tile.block_k
    tiles = cdiv(pairs, tile.block_m) if planned is None else len(planned[1])
    act, y = x.new_empty(tiles * tile.block_m, padded), x.new_empty(pairs, hidden)
    constants = {
        "E": experts if len(operands) > 2 else 0, "H": hidden, "I": width, "IP": padded, "BLOCK_M": tile.block_m,
        "SEPARATE": tile.separate, "PLANNED": planned is not None, "SHARED": len(operands) > 2, "UPCAST": INTERPRETED,
        "PDL": PDL, **w13.constants, **tile.order, **launch_options(tile.num_warps, tile.num_stages, tile.registers),
    }  # fmt: skip
    up_kernel[(cdiv(padded, tile.block_w // 2), tiles)](
        x, *w13.tensors, *shared13.tensors, *(planned or (y, y)), act, pairs, *activation, HP=x.shape[1], N=per_token,
        BLOCK_I=tile.block_w // 2, **constants,
    )  # fmt: skip
    down_kernel[(cdiv(hidden, tile.block_w), tiles)](
        act,
        *w2.tensors,
        *shared2.tensors,
        *(planned or (y, y)),
        y,
        pairs,
        BLOCK_H=tile.block_w,
        SPLITS=1,
        **constants,
    )
    return y
