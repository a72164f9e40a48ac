"""Products with one packed weight: few rows on the kernels of the experts, many rows in the matrix library, for which
the weight is widened in memory, some rows at a time.

Shapes: T rows, K columns (inputs), N outputs, H hidden, I inner width.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from target_model.kernels.common import INTERPRETED, PDL, begin, cdiv, launch_options, require_tensor
from target_model.kernels.moe import Operand, Tile, Weight, arrange, operand, two_products
from target_model.kernels.moe_gemm import down_kernel, factors, weighted_sum_kernel
from target_model.kernels.moe_widen import UNSCALE, numbers_per_word, widen_word
from target_model.layers import clamped_swiglu
from target_model.quantised import TILE_ROWS, QuantisedWeight

# From here on widening the weight in memory costs less than widening it again for every tile of rows.
MANY_ROWS = 512
# Programs that fill the device; where there are fewer, columns are split over programs.
PROGRAMS = 400


def linear(x_TK: Tensor, weight_NK: QuantisedWeight) -> Tensor:
    """x times a packed weight, [T, N], bf16."""
    rows, columns = x_TK.shape
    outputs = weight_NK.shape[0]
    require_tensor("x", x_TK, (None, weight_NK.shape[1]), (torch.bfloat16,))
    weight = operand(weight_NK, x_TK)
    if rows >= MANY_ROWS:
        return torch.cat([F.linear(x_TK, widened(weight, first)) for first in range(0, outputs, TILE_ROWS)], dim=-1)
    tile = linear_shape(rows, outputs)
    x = arrange(x_TK, tile, weight.per)
    programs = cdiv(outputs, tile.block_w) * cdiv(rows, tile.block_m)
    splits = max(1, min(PROGRAMS // programs, columns // tile.block_k // 2, 8))
    y = x_TK.new_empty(rows, outputs)
    parts = y if splits == 1 else y.new_empty(rows * splits, outputs, dtype=torch.float32)
    down_kernel[(cdiv(outputs, tile.block_w), cdiv(rows, tile.block_m), splits)](
        x, *weight.tensors, *weight.tensors, y, y, parts, rows, E=0, H=outputs, I=columns, IP=x.shape[1],
        BLOCK_M=tile.block_m, BLOCK_H=tile.block_w, SPLITS=splits, SEPARATE=tile.separate, PLANNED=False,
        SHARED=False, UPCAST=INTERPRETED, PDL=PDL, **tile.order, **weight.constants,
        **launch_options(tile.num_warps, tile.num_stages),
    )  # fmt: skip
    if splits > 1:
        weighted_sum_kernel[(rows, cdiv(outputs, 1024))](
            parts, parts, y, H=outputs, N=0, SPLITS=splits, SHARED=True, BLOCK_H=1024, PDL=PDL, **launch_options(4, 1)
        )
    return y


def mlp(x_TH: Tensor, w13_2IH: Weight, w2_HI: Weight, alpha: float, limit: float, beta: float) -> Tensor:
    """w2 swiglu(w13 x), [T, H], with packed weights of one format."""
    rows, hidden = x_TH.shape
    if rows >= MANY_ROWS:
        return linear(clamped_swiglu(linear(x_TH, w13_2IH), alpha, limit, beta), w2_HI)
    require_tensor("x", x_TH, (None, w13_2IH.shape[1]), (torch.bfloat16,))
    operands = operand(w13_2IH, x_TH), operand(w2_HI, x_TH)
    tile = linear_shape(rows, hidden)
    x = arrange(x_TH, tile, operands[0].per)
    return two_products(x, operands, rows, hidden, (alpha, limit, beta), tile)


def linear_shape(rows: int, outputs: int) -> Tile:
    """The tile for this many rows: few outputs are cut finer, so that all multiprocessors have work."""
    if rows <= 16:
        block_m = 8 if rows <= 8 else 16
        if outputs < 16384:
            return Tile(block_m, 32, 256, num_warps=2, num_stages=5)
        return Tile(block_m, 64, 256, num_warps=4, num_stages=4)
    if rows <= 64:
        return Tile(32 if rows <= 32 else 64, 64, 128, num_warps=4, num_stages=4)
    return Tile(128, 128, 128, num_warps=8, num_stages=3)


def widened(weight: Operand, first: int) -> Tensor:
    """Rows first .. first + TILE_ROWS of a packed weight in bf16."""
    outputs, words = weight.values.shape
    rows, columns = min(TILE_ROWS, outputs - first), words * weight.per
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=weight.values.device)
    block_k = 64 * weight.per
    widen_kernel[(cdiv(rows, 16), cdiv(columns, block_k))](
        *weight.tensors, out, first, outputs, K=columns, BLOCK_K=block_k, UPCAST=INTERPRETED, PDL=PDL,
        **weight.constants, **launch_options(4, 1),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["first", "outputs"])
def widen_kernel(
    values,  # int16 [N, K / numbers in a word]
    scale,  # uint8 [N, K / GROUP]
    row_scale,  # fp32 [N] with ROW
    out,  # bf16 [rows from first on, K]
    first,
    outputs,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ROW: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    PER: tl.constexpr = numbers_per_word(FORMAT)
    WORDS: tl.constexpr = BLOCK_K // PER
    own = tl.program_id(0) * 16 + tl.arange(0, 16)
    row = (first + own).to(tl.int64)
    ok = row < outputs
    k = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    word = tl.load(values + row[:, None] * (K // PER) + k[None, :], mask=ok[:, None] & (k < K // PER)[None, :], other=0)
    factor = factors(scale, row, ok, tl.program_id(1) * BLOCK_K, K, 16, BLOCK_K, FORMAT, GROUP, True)
    if PER == 4:
        even = tl.join(widen_word(word, factor, 0, FORMAT, UPCAST), widen_word(word, factor, 2, FORMAT, UPCAST))
        odd = tl.join(widen_word(word, factor, 1, FORMAT, UPCAST), widen_word(word, factor, 3, FORMAT, UPCAST))
        numbers = tl.reshape(tl.join(even, odd), [16, BLOCK_K])
    else:
        low, high = widen_word(word, factor, 0, FORMAT, UPCAST), widen_word(word, factor, 1, FORMAT, UPCAST)
        numbers = tl.reshape(tl.join(low, high), [16, BLOCK_K])
    numbers = numbers.to(tl.float32) * UNSCALE
    if ROW != "":
        number = tl.load(row_scale + row, mask=ok, other=1.0)
        numbers *= number[:, None] if ROW == "multiply" else (1.0 / number)[:, None]
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    to = out + own.to(tl.int64)[:, None] * K + column[None, :]
    tl.store(to, numbers.to(tl.bfloat16), mask=ok[:, None] & (column < K)[None, :])
