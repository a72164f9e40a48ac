"""The two products of a mixture of experts, grouped by expert, and the weighted sum behind them.

    act[m] = swiglu(w13[e] x[token(m)]);  y[pair(m)] = w2[e] act[m];  out[t] = sum_n weights[t, n] y[t N + n]
    swiglu: gate clamped above, up on both sides; gate * sigmoid(alpha * gate) * (up + beta)
T rows, H hidden, E experts, I expert width, N experts of a token; places m are the pairs grouped by expert
(plan_kernel), BLOCK_M of one expert to a tile; without PLANNED there is one expert, and places, pairs and rows are the
same. With SHARED the expert of id E is one that every row passes, whose weights stand elsewhere. The weights are the
first operand (their rows are the M of the matrix units) and the tokens the second, so a tile of few tokens wastes
nothing and every weight is read once for it. A tile of w13 holds gate rows and the up rows of the same columns.

Weights are as wide as x, or packed (FORMAT "e2m1" or "e4m3", see moe_widen.py) with a scale for each GROUP of columns
(uint8 E8M0 for 32, e4m3 bytes for 16, 0: none) and a number for each row (ROW: its sums are multiplied or divided by
it; "": none). Packed weights are widened to bf16 in registers. Their other operands, x and act, lie in the order of
moe_widen.py, HP and IP wide: H and I filled up to whole BLOCK_K.
"""

import triton
import triton.language as tl

from target_model.kernels.common import begin, widen
from target_model.kernels.moe_widen import (
    UNSCALE,
    column_of,
    multiplier,
    numbers_per_word,
    own_order,
    widen_word,
)


@triton.jit
def product(weights, scales, row_numbers, row_at, row_ok, x, x_at, x_ok, begin, end, W: tl.constexpr,
            ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
            ROW: tl.constexpr, RUN: tl.constexpr, SEPARATE: tl.constexpr, MASKED: tl.constexpr,
            UPCAST: tl.constexpr):  # fmt: skip
    """weights[rows] . x^T over columns begin .. end, fp32 [ROWS, BLOCK_M]; row_at, x_at: int64 row numbers of the
    [.., W] weights, and where rows of x begin."""
    acc = tl.zeros([ROWS, BLOCK_M], tl.float32)
    acc1, acc2, acc3 = acc, acc, acc
    for first in range(begin, end, BLOCK_K):
        acc, acc1, acc2, acc3 = product_step(
            weights, scales, row_at, row_ok, x, x_at, x_ok, first, acc, acc1, acc2, acc3, W, ROWS, BLOCK_K, FORMAT,
            GROUP, RUN, SEPARATE, MASKED, UPCAST,
        )  # fmt: skip
    if SEPARATE:
        acc += acc1 + acc2 + acc3
    if FORMAT != "none":
        acc *= UNSCALE
    if ROW != "":
        number = tl.load(row_numbers + row_at, mask=row_ok, other=1.0)
        acc *= number[:, None] if ROW == "multiply" else (1.0 / number)[:, None]
    return acc


@triton.jit
def product_step(weights, scales, row_at, row_ok, x, x_at, x_ok, first, acc, acc1, acc2, acc3, W: tl.constexpr,
                 ROWS: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
                 RUN: tl.constexpr, SEPARATE: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """acc += the product over columns first .. first + BLOCK_K, with SEPARATE each plane to its own sum: their products
    need not wait for one another. Without MASKED no tile reaches over an edge."""
    PER: tl.constexpr = numbers_per_word(FORMAT)
    WORDS: tl.constexpr = BLOCK_K // PER
    k = first // PER + tl.arange(0, WORDS)
    at = weights + row_at[:, None] * (W // PER) + k[None, :]
    w = tl.load(at, mask=row_ok[:, None] & (k < W // PER)[None, :], other=0) if MASKED else tl.load(at)
    if FORMAT != "none":
        w = own_order(w, ROWS, WORDS, RUN)
        factor = factors(scales, row_at, row_ok, first, W, ROWS, BLOCK_K, FORMAT, GROUP, MASKED)
        factor = own_order(factor, ROWS, WORDS, RUN)
    for n in tl.static_range(PER):
        position = first + n * WORDS + tl.arange(0, WORDS)
        ok = x_ok[None, :] & (column_of(position, PER, BLOCK_K, RUN) < W)[:, None] if MASKED else x_ok[None, :]
        tokens = tl.load(x + x_at[None, :] + position[:, None], mask=ok, other=0.0)
        plane = widen(w, UPCAST) if FORMAT == "none" else widen_word(w, factor, n, FORMAT, UPCAST)
        if n == 0 or not SEPARATE:
            acc = tl.dot(plane, widen(tokens, UPCAST), acc, input_precision="ieee")
        elif n == 1:
            acc1 = tl.dot(plane, widen(tokens, UPCAST), acc1, input_precision="ieee")
        elif n == 2:
            acc2 = tl.dot(plane, widen(tokens, UPCAST), acc2, input_precision="ieee")
        else:
            acc3 = tl.dot(plane, widen(tokens, UPCAST), acc3, input_precision="ieee")
    return acc, acc1, acc2, acc3


@triton.jit
def factors(scales, row_at, row_ok, first, W: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
            FORMAT: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """What `widen_word` multiplies each word by, [ROWS, BLOCK_K / numbers in a word]."""
    WORDS: tl.constexpr = BLOCK_K // numbers_per_word(FORMAT)
    if GROUP == 0:
        return tl.full([ROWS, WORDS], (127 + 120 - 16) << 7, tl.int16)
    else:
        g = first // GROUP + tl.arange(0, BLOCK_K // GROUP)
        at = scales + row_at[:, None] * (W // GROUP) + g[None, :]
        scale = tl.load(at, mask=row_ok[:, None] & (g < W // GROUP)[None, :], other=0) if MASKED else tl.load(at)
        factor = multiplier(scale, FORMAT, GROUP)
        SHARE: tl.constexpr = WORDS // (BLOCK_K // GROUP)
        factor = tl.broadcast_to(factor[:, :, None], [ROWS, BLOCK_K // GROUP, SHARE])
        return tl.reshape(factor, [ROWS, WORDS])


@triton.jit(do_not_specialize=["rows"])
def up_kernel(
    x,  # [T, HP]
    w13,  # [E, 2I, H], packed along H with a FORMAT
    w13_scale,  # uint8 [E, 2I, H / GROUP]
    w13_row,  # fp32 [E, 2I] with ROW
    shared,  # [2I, H], as w13, with SHARED
    shared_scale,
    shared_row,
    order,  # int32 [tiles * BLOCK_M] with PLANNED
    tile_expert,  # int32 [tiles] with PLANNED
    act,  # [tiles * BLOCK_M, IP]
    rows,
    alpha,
    limit,
    beta,
    E: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    HP: tl.constexpr,
    IP: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ROW: tl.constexpr,
    RUN: tl.constexpr,
    SEPARATE: tl.constexpr,
    PLANNED: tl.constexpr,
    SHARED: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    expert = tl.load(tile_expert + tl.program_id(1)) if PLANNED else tl.program_id(1) * 0
    if expert < 0:
        return
    if SHARED:
        if expert == E:
            w13, w13_scale, w13_row, expert = shared, shared_scale, shared_row, expert * 0
    if half_empty(order, BLOCK_M, FORMAT, PLANNED):
        up_tile(x, w13, w13_scale, w13_row, expert, order, act, rows, alpha, limit, beta, H, I, HP, IP, N, BLOCK_M,
                BLOCK_M // 2, BLOCK_I, BLOCK_K, FORMAT, GROUP, ROW, RUN, SEPARATE, PLANNED, UPCAST)  # fmt: skip
    else:
        up_tile(x, w13, w13_scale, w13_row, expert, order, act, rows, alpha, limit, beta, H, I, HP, IP, N, BLOCK_M,
                BLOCK_M, BLOCK_I, BLOCK_K, FORMAT, GROUP, ROW, RUN, SEPARATE, PLANNED, UPCAST)  # fmt: skip


@triton.jit
def half_empty(order, BLOCK_M: tl.constexpr, FORMAT: tl.constexpr, PLANNED: tl.constexpr):
    """Whether a large tile has at most half as many places: what its products cost depends on them where packed weights
    are cheap to read."""
    if PLANNED and FORMAT != "none" and BLOCK_M >= 32:
        return tl.load(order + tl.program_id(1) * BLOCK_M + BLOCK_M // 2) < 0
    else:
        return False


@triton.jit
def up_tile(x, w13, w13_scale, w13_row, expert, order, act, rows, alpha, limit, beta, H: tl.constexpr,
            I: tl.constexpr, HP: tl.constexpr, IP: tl.constexpr, N: tl.constexpr,  # noqa: E741
            STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr,
            FORMAT: tl.constexpr, GROUP: tl.constexpr, ROW: tl.constexpr, RUN: tl.constexpr, SEPARATE: tl.constexpr,
            PLANNED: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """The first BLOCK_M places of a tile of STRIDE."""
    m, pair = places(order, rows, STRIDE, BLOCK_M, PLANNED)
    token = tl.maximum(pair, 0) // N
    # The tile's columns are SHARE neighbours of each plane, in the order in which act holds them.
    PER: tl.constexpr = numbers_per_word(FORMAT)
    SHARE: tl.constexpr = BLOCK_I // PER
    first = tl.program_id(0) * BLOCK_I
    if PER > 1:
        first = first // BLOCK_K * BLOCK_K + first % BLOCK_K // PER
    i = tl.arange(0, BLOCK_I)
    position = first + i // SHARE * (BLOCK_K // PER) + i % SHARE
    # Gate and up of a column stand 8 rows apart: in the matrix units' sums both belong to the same thread.
    row = tl.arange(0, 2 * BLOCK_I)
    own = row // 16 * 8 + row % 8
    column = column_of(first + own // SHARE * (BLOCK_K // PER) + own % SHARE, PER, BLOCK_K, RUN)
    w_row = expert.to(tl.int64) * (2 * I) + column + row // 8 % 2 * I
    MASKED: tl.constexpr = H % BLOCK_K != 0 or I % BLOCK_I != 0 or I != IP
    acc = product(w13, w13_scale, w13_row, w_row, column < I, x, token.to(tl.int64) * HP, pair >= 0, 0, H, H,
                  2 * BLOCK_I, BLOCK_M, BLOCK_K, FORMAT, GROUP, ROW, RUN, SEPARATE, MASKED, UPCAST)  # fmt: skip
    acc = tl.permute(tl.reshape(acc, [BLOCK_I // 8, 2, 8, BLOCK_M]), [0, 2, 3, 1])
    gate, up = tl.split(tl.reshape(acc, [BLOCK_I, BLOCK_M, 2]))
    gate = gate.to(act.dtype.element_ty).to(tl.float32)  # the projection's own rounding
    up = up.to(act.dtype.element_ty).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    result = gate / (1.0 + tl.exp(-alpha * gate)) * (up + beta)
    to = act + m.to(tl.int64)[None, :] * IP + position[:, None]
    tl.store(to, result.to(act.dtype.element_ty), mask=(pair >= 0)[None, :] & (position < IP)[:, None])


@triton.jit
def places(order, rows, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, PLANNED: tl.constexpr):
    """The first BLOCK_M places of this program's tile, and the pair at each of them (-1: empty)."""
    m = tl.program_id(1) * STRIDE + tl.arange(0, BLOCK_M)
    if PLANNED:
        return m, tl.load(order + m)
    else:
        return m, tl.where(m < rows, m, -1)


@triton.jit(do_not_specialize=["rows"])
def down_kernel(
    act,  # [tiles * BLOCK_M, IP]
    w2,  # [E, H, I], packed along I with a FORMAT
    w2_scale,  # uint8 [E, H, I / GROUP]
    w2_row,  # fp32 [E, H] with ROW
    shared,  # [H, I], as w2, with SHARED
    shared_scale,
    shared_row,
    order,  # int32 [tiles * BLOCK_M] with PLANNED
    tile_expert,  # int32 [tiles] with PLANNED
    y,  # [T * N * SPLITS, H]: the columns of w2 are split over programs
    rows,
    E: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    IP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ROW: tl.constexpr,
    RUN: tl.constexpr,
    SPLITS: tl.constexpr,
    SEPARATE: tl.constexpr,
    PLANNED: tl.constexpr,
    SHARED: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    expert = tl.load(tile_expert + tl.program_id(1)) if PLANNED else tl.program_id(1) * 0
    if expert < 0:
        return
    if SHARED:
        if expert == E:
            w2, w2_scale, w2_row, expert = shared, shared_scale, shared_row, expert * 0
    if half_empty(order, BLOCK_M, FORMAT, PLANNED):
        down_tile(act, w2, w2_scale, w2_row, expert, order, y, rows, H, I, IP, BLOCK_M, BLOCK_M // 2, BLOCK_H, BLOCK_K,
                  FORMAT, GROUP, ROW, RUN, SPLITS, SEPARATE, PLANNED, UPCAST)  # fmt: skip
    else:
        down_tile(act, w2, w2_scale, w2_row, expert, order, y, rows, H, I, IP, BLOCK_M, BLOCK_M, BLOCK_H, BLOCK_K,
                  FORMAT, GROUP, ROW, RUN, SPLITS, SEPARATE, PLANNED, UPCAST)  # fmt: skip


@triton.jit
def down_tile(act, w2, w2_scale, w2_row, expert, order, y, rows, H: tl.constexpr, I: tl.constexpr,  # noqa: E741
              IP: tl.constexpr, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
              BLOCK_K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, ROW: tl.constexpr, RUN: tl.constexpr,
              SPLITS: tl.constexpr, SEPARATE: tl.constexpr, PLANNED: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """The first BLOCK_M places of a tile of STRIDE."""
    m, pair = places(order, rows, STRIDE, BLOCK_M, PLANNED)
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    MASKED: tl.constexpr = I % BLOCK_K != 0 or H % BLOCK_H != 0
    begin, end = 0, I
    if SPLITS > 1:
        SHARE: tl.constexpr = ((I + BLOCK_K - 1) // BLOCK_K + SPLITS - 1) // SPLITS * BLOCK_K
        begin = tl.program_id(2) * SHARE
        end = tl.minimum(begin + SHARE, I)
    acc = product(w2, w2_scale, w2_row, expert.to(tl.int64) * H + h, h < H, act, m.to(tl.int64) * IP, pair >= 0, begin,
                  end, I, BLOCK_H, BLOCK_M, BLOCK_K, FORMAT, GROUP, ROW, RUN, SEPARATE, MASKED, UPCAST)  # fmt: skip
    to = y + (pair.to(tl.int64) * SPLITS + tl.program_id(2))[None, :] * H + h[:, None]
    tl.store(to, acc.to(y.dtype.element_ty), mask=(pair >= 0)[None, :] & (h < H)[:, None])


@triton.jit
def weighted_sum_kernel(
    y,  # [T * N * SPLITS, H], with SHARED [T * (N + 1) * SPLITS, H]
    weights,  # fp32 [T, N]
    out,  # [T, H]
    H: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    ALL: tl.constexpr = N + 1 if SHARED else N
    total = tl.zeros([BLOCK_H], tl.float32)
    if SHARED:
        total += sum_of_splits(y, t * ALL + N, h, H, H, SPLITS)
    for n in tl.static_range(N):
        weight = tl.load(weights + t * N + n)
        # Pairs of weight 0 belong to experts that are not here: nothing was written for them.
        total += sum_of_splits(y, t * ALL + n, h, tl.where(weight != 0, H, 0), H, SPLITS) * weight
    tl.store(out + t * H + h, total.to(out.dtype.element_ty), mask=h < H)


@triton.jit
def sum_of_splits(y, pair, h, written, H: tl.constexpr, SPLITS: tl.constexpr):
    """A pair's numbers, of which the first `written` exist."""
    total = tl.load(y + pair * SPLITS * H + h, mask=h < written, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(y + (pair * SPLITS + split) * H + h, mask=h < written, other=0.0).to(tl.float32)
    return total
