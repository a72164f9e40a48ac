"""The two products of a mixture of experts, grouped by expert, and the weighted sum behind them.

    act[m] = swiglu(w13[e] x[token(m)]);  y[pair(m)] = w2[e] act[m];  out[t] = sum_n weights[t, n] y[t N + n]
    swiglu: gate clamped above, up on both sides; gate * sigmoid(alpha * gate) * (up + beta)
T rows, H hidden, E experts, I expert width, N experts of a token; places m are the pairs grouped by expert
(plan_kernel), BLOCK_M of one expert to a tile. The weights are the first operand (their rows are the M of the matrix
units) and the tokens the second, so a tile of 16 tokens wastes nothing and every weight is read once for it. A tile of
w13 holds gate rows and the up rows of the same columns. Weights are as wide as x, or microscaled (FORMAT): "e4m3"
bytes, or "e2m1" two to a byte, low nibble first, with one E8M0 scale for 32 values along the columns; they are widened
to bf16 in registers.
"""

import triton
import triton.language as tl

from target_model.kernels.common import widen


@triton.jit
def product_step(weights, scales, row_at, row_ok, tokens, first, acc, W: tl.constexpr, BLOCK_K: tl.constexpr,
FORMAT: tl.constexpr,
                 UPCAST: tl.constexpr):  # fmt: skip
    """acc += weights[rows, first : first + BLOCK_K] . tokens; row_at: int64 row numbers of the [.., W] weights."""
    if FORMAT == "none":
        k = first + tl.arange(0, BLOCK_K)
        w = tl.load(weights + row_at[:, None] * W + k[None, :], mask=row_ok[:, None] & (k < W)[None, :], other=0.0)
        return acc + tl.dot(widen(w, UPCAST), widen(tokens, UPCAST), input_precision="ieee")
    else:
        PACK: tl.constexpr = 2 if FORMAT == "e2m1" else 1
        k = first // PACK + tl.arange(0, BLOCK_K // PACK)
        g = first // 32 + tl.arange(0, BLOCK_K // 32)
        w = tl.load(
            weights + row_at[:, None] * (W // PACK) + k[None, :],
            mask=row_ok[:, None] & (k < W // PACK)[None, :],
            other=0,
        )
        scale = tl.load(
            scales + row_at[:, None] * (W // 32) + g[None, :], mask=row_ok[:, None] & (g < W // 32)[None, :], other=0
        )
        return tl.dot_scaled(w, scale, FORMAT, tokens, None, "bf16", acc)


@triton.jit
def up_kernel(
    x,  # [T, H]
    w13,  # [E, 2I, H], packed along H with a FORMAT
    w13_scale,  # uint8 [E, 2I, H / 32] with a FORMAT
    order,  # int32 [tiles * BLOCK_M]
    tile_expert,  # int32 [tiles]
    act,  # [tiles * BLOCK_M, I]
    alpha,
    limit,
    beta,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    pair = tl.load(order + m)
    token = tl.maximum(pair, 0) // N
    row = tl.arange(0, 2 * BLOCK_I)
    column = tl.program_id(0) * BLOCK_I + row % BLOCK_I
    w_row = expert.to(tl.int64) * (2 * I) + column + tl.where(row < BLOCK_I, 0, I)
    k = tl.arange(0, BLOCK_K)
    x_at = x + token.to(tl.int64)[None, :] * H + k[:, None]
    acc = tl.zeros([2 * BLOCK_I, BLOCK_M], tl.float32)
    for first in range(0, H, BLOCK_K):
        tokens = tl.load(x_at + first, mask=(pair >= 0)[None, :] & (first + k < H)[:, None], other=0.0)
        acc = product_step(w13, w13_scale, w_row, column < I, tokens, first, acc, H, BLOCK_K, FORMAT, UPCAST)
    gate, up = tl.split(tl.permute(tl.reshape(acc, [2, BLOCK_I, BLOCK_M]), [1, 2, 0]))
    gate = gate.to(act.dtype.element_ty).to(tl.float32)  # the projection's own rounding
    up = up.to(act.dtype.element_ty).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    result = gate / (1.0 + tl.exp(-alpha * gate)) * (up + beta)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    tl.store(act + m.to(tl.int64)[None, :] * I + i[:, None], result.to(act.dtype.element_ty), mask=(i < I)[:, None])


@triton.jit
def down_kernel(
    act,  # [tiles * BLOCK_M, I]
    w2,  # [E, H, I], packed along I with a FORMAT
    w2_scale,  # uint8 [E, H, I / 32] with a FORMAT
    order,  # int32 [tiles * BLOCK_M]
    tile_expert,  # int32 [tiles]
    y,  # [T * N, H]
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    k = tl.arange(0, BLOCK_K)
    w_row = expert.to(tl.int64) * H + h
    act_at = act + m.to(tl.int64)[None, :] * I + k[:, None]
    acc = tl.zeros([BLOCK_H, BLOCK_M], tl.float32)
    for first in range(0, I, BLOCK_K):
        a = tl.load(act_at + first, mask=(first + k < I)[:, None], other=0.0)
        acc = product_step(w2, w2_scale, w_row, h < H, a, first, acc, I, BLOCK_K, FORMAT, UPCAST)
    pair = tl.load(order + m)
    to = y + pair.to(tl.int64)[None, :] * H + h[:, None]
    tl.store(to, acc.to(y.dtype.element_ty), mask=(pair >= 0)[None, :] & (h < H)[:, None])


@triton.jit
def weighted_sum_kernel(
    y,  # [T * N, H]
    weights,  # fp32 [T, N]
    out,  # [T, H]
    H: tl.constexpr,
    N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_H], tl.float32)
    for n in tl.static_range(N):
        weight = tl.load(weights + t * N + n)
        # Pairs of weight 0 belong to experts that are not here: nothing was written for them.
        written = tl.where(weight != 0, H, 0)
        part = tl.load(y + (t * N + n) * H + h, mask=h < written, other=0.0).to(tl.float32)
        total += part * weight
    tl.store(out + t * H + h, total.to(out.dtype.element_ty), mask=h < H)
