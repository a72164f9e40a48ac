"""The products of packed experts with some dozens of rows each, on Hopper: 256 weight rows x up to 64 rows a tile.

One warp brings weights and rows into shared memory with the copy engine. Two groups of four warps each widen 2 x 64
weight rows in registers and multiply them, plane after plane (moe_widen.py): while the matrix units work on one plane,
the next is widened. Programs stay and walk over all tiles, so that the next tile's weights arrive while results are
written. This is more than `tl.dot` can say: there, each product with a first operand from registers is waited for.

Shapes as in moe_gemm.py. x stands at the places of the plan, [places, H]; so does act [places, I]; both in the order of
the products. Written in Gluon, which Triton's interpreter does not know: the CPU's tests only compile it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from target_model.kernels.common import INTERPRETED, PDL, begin, cdiv, launch_options
from target_model.kernels.moe_widen import UNSCALE, column_of, multiplier, numbers_per_word, widen_word

# Rows of a tile, and words of a weight row in a step: 128 bytes, which is how wide the copy engine's swizzle is.
TILE_ROWS = 64
STEP_WORDS = 64
# Tiles in shared memory at a time: 64 KB each in MXFP4, 48 KB in MXFP8.
STAGES = {"e2m1": 3, "e4m3": 4}

# 64 rows of 64 words as a first operand holds their numbers (`own_order`): (rows, word) of each register, lane, warp.
LANES = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 4], [0, 32]], LANES, [[16, 0], [32, 0]], [], [64, STEP_WORDS]
    )
)
# The same with the words of a group apart: (row, group, word), 8 words in MXFP4 and 16 in MXFP8.
WARPS = [[16, 0, 0], [32, 0, 0]]
GROUPS_OF_8 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 0, 2], [0, 0, 4], [0, 4, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        WARPS, [], [64, 8, 8],
    )
)  # fmt: skip
GROUPS_OF_16 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 0, 2], [0, 0, 4], [0, 2, 0]],
        [[0, 0, 8], [0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        WARPS, [], [64, 4, 16],
    )
)  # fmt: skip
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
# Named anew between Triton 3.6 and 3.9.
copy_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def serves(form: tuple[str, int, str], hidden: int, width: int, device: torch.device) -> bool:
    """Whether experts of this format (`Operand.format`) and size can be multiplied here."""
    if INTERPRETED or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    name, group, row = form
    whole = name in STAGES and all(size % (STEP_WORDS * numbers_per_word(name)) == 0 for size in (hidden, width))
    return whole and group == 32 and row == "" and hidden % 256 == 0 and width % 128 == 0


def two_products(
    x_TH: Tensor,
    order: Tensor,
    tile_expert: Tensor,
    w13: tuple[Tensor, Tensor],
    w2: tuple[Tensor, Tensor],
    form: str,
    per_token: int,
    activation: tuple[float, float, float],
) -> Tensor:
    """Both products for all pairs, [T * per_token, H]. order, tile_expert: `moe.plan` with tiles of TILE_ROWS; w13, w2:
    words [E, .., W] and their scales."""
    (rows, hidden), per = x_TH.shape, numbers_per_word(form)
    width = w2[0].shape[-1] * per
    placed, act = (x_TH.new_empty(len(order), columns) for columns in (hidden, width))
    y = x_TH.new_empty(rows * per_token, hidden)
    place_kernel[(len(order), cdiv(hidden, 2048))](
        x_TH, order, tile_expert, placed, H=hidden, N=per_token, PER=per, BLOCK=2048, PDL=PDL,
        **launch_options(4, 1),
    )  # fmt: skip
    for up, (words, scale), source, out in ((True, w13, placed, act), (False, w2, act, y)):
        work = len(tile_expert) * (width // 128 if up else hidden // 256)
        wide_kernel[(min(work, multiprocessors(x_TH.device)),)](
            boxes(words, 64), boxes(source, 16), scale, order, tile_expert, out, *activation, work, UP=up, H=hidden,
            I=width, STAGES=STAGES[form], FORMAT=form, num_warps=4, num_stages=1,
        )  # fmt: skip
    return y


def multiprocessors(device: torch.device) -> int:
    """Of the device; without one, an H200's."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def boxes(tensor: Tensor, rows: int) -> TensorDescriptor:
    """What the copy engine takes from a tensor [.., columns]: `rows` rows x 128 bytes."""
    return TensorDescriptor.from_tensor(tensor.view(-1, tensor.shape[-1]), [rows, 64], SWIZZLED.value)


@triton.jit
def place_kernel(
    x,  # [T, H]
    order,  # int32 [places]
    tile_expert,  # int32 [places / 64]
    out,  # [places, H]
    H: tl.constexpr,
    N: tl.constexpr,
    PER: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    place = tl.program_id(0)
    if tl.load(tile_expert + place // 64) < 0:
        return
    pair = tl.load(order + place)
    if pair >= 0:
        position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        column = column_of(position, PER, 64 * PER, 2)
        values = tl.load(x + (pair // N).to(tl.int64) * H + column, mask=column < H, other=0.0)
        tl.store(out + place.to(tl.int64) * H + position, values, mask=position < H)


@gluon.jit
def wide_kernel(
    weights,  # boxes of [E * rows, W]
    x,  # boxes of [places, columns of the weight]
    scale,  # uint8 [E, rows, columns / 32]
    order,  # int32 [places]
    tile_expert,  # int32 [places / 64], -1: unused
    out,  # UP: act [places, I]; else y [pairs, H]
    alpha,
    limit,
    beta,
    work,  # tiles x blocks of 256 weight rows
    UP: gl.constexpr,
    H: gl.constexpr,
    I: gl.constexpr,  # noqa: E741
    STAGES: gl.constexpr,
    FORMAT: gl.constexpr,
):
    PER: gl.constexpr = numbers_per_word(FORMAT)
    w_smem = gl.allocate_shared_memory(gl.int16, [STAGES * 4, 64, 64], SWIZZLED)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES * PER, 64, 64], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (gl.constexpr(0), UP, scale, order, tile_expert, out, alpha, limit, beta, work, w_smem, x_smem,
                        full, empty, H, I, STAGES, FORMAT)),
            (multiply, (gl.constexpr(1), UP, scale, order, tile_expert, out, alpha, limit, beta, work, w_smem, x_smem,
                        full, empty, H, I, STAGES, FORMAT)),
            (bring, (UP, weights, x, order, tile_expert, work, w_smem, x_smem, full, empty, H, I, STAGES, FORMAT)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def bring(UP: gl.constexpr, weights, x, order, tile_expert, work, w_smem, x_smem, full, empty, H: gl.constexpr,
          I: gl.constexpr, STAGES: gl.constexpr, FORMAT: gl.constexpr):  # noqa: E741  # fmt: skip
    """All tiles' weights, and of their rows as many boxes of 16 as they have."""
    PER: gl.constexpr = numbers_per_word(FORMAT)
    BLOCKS: gl.constexpr = I // 128 if UP else H // 256
    STEPS: gl.constexpr = (H if UP else I) // (64 * PER)
    used = 0
    for number in range(gl.program_id(0), work, gl.num_programs(0)):
        expert = gl.load(tile_expert + number // BLOCKS)
        if expert >= 0:
            place = number // BLOCKS * 64
            second = gl.load(order + place + 16) >= 0
            third = gl.load(order + place + 32) >= 0
            fourth = gl.load(order + place + 48) >= 0
            row = expert * (2 * I) + number % BLOCKS * 128 if UP else expert * H + number % BLOCKS * 256
            for step in range(STEPS):
                stage = (used + step) % STAGES
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), ((used + step) // STAGES & 1) ^ 1)
                if fourth:
                    mbarrier.expect(bar, 32768 + 4 * PER * 2048)
                elif third:
                    mbarrier.expect(bar, 32768 + 3 * PER * 2048)
                elif second:
                    mbarrier.expect(bar, 32768 + 2 * PER * 2048)
                else:
                    mbarrier.expect(bar, 32768 + PER * 2048)
                for box in gl.static_range(4):
                    # Two for each group of warps: gate and up of 64 columns, or 128 rows.
                    if UP:
                        at = row + box // 2 * 64 + box % 2 * I
                    else:
                        at = row + box * 64
                    copy_box(weights, [at, step * 64], bar, w_smem.index(stage * 4 + box))
                for n in gl.static_range(PER):
                    column = (step * PER + n) * 64
                    to = x_smem.index(stage * PER + n)
                    copy_box(x, [place, column], bar, to.slice(0, 16))
                    copy_box(x, [place + 16, column], bar, to.slice(16, 16), pred=second)
                    copy_box(x, [place + 32, column], bar, to.slice(32, 16), pred=third)
                    copy_box(x, [place + 48, column], bar, to.slice(48, 16), pred=fourth)
            used += STEPS


@gluon.jit
def multiply(GROUP: gl.constexpr, UP: gl.constexpr, scale, order, tile_expert, out, alpha, limit, beta, work, w_smem,
             x_smem, full, empty, H: gl.constexpr, I: gl.constexpr, STAGES: gl.constexpr,  # noqa: E741
             FORMAT: gl.constexpr):  # fmt: skip
    """Half of the weight rows of every tile; tiles of at most 32 rows at half their width."""
    BLOCKS: gl.constexpr = I // 128 if UP else H // 256
    STEPS: gl.constexpr = (H if UP else I) // (64 * numbers_per_word(FORMAT))
    used = 0
    for number in range(gl.program_id(0), work, gl.num_programs(0)):
        expert = gl.load(tile_expert + number // BLOCKS)
        if expert >= 0:
            place = number // BLOCKS * 64
            few = gl.load(order + place + 32) < 0
            if UP:
                first = number % BLOCKS * 128 + 64 * GROUP
                row = expert * (2 * I) + first
                if few:
                    up_tile(scale, order, out, place, row, first, alpha, limit, beta, w_smem, x_smem, full, empty, used,
                            GROUP, 32, H, I, STAGES, FORMAT)  # fmt: skip
                else:
                    up_tile(scale, order, out, place, row, first, alpha, limit, beta, w_smem, x_smem, full, empty, used,
                            GROUP, 64, H, I, STAGES, FORMAT)  # fmt: skip
            else:
                first = number % BLOCKS * 256 + 128 * GROUP
                row = expert * H + first
                if few:
                    down_tile(scale, order, out, place, row, first, w_smem, x_smem, full, empty, used, GROUP, 32, H, I,
                              STAGES, FORMAT)  # fmt: skip
                else:
                    down_tile(scale, order, out, place, row, first, w_smem, x_smem, full, empty, used, GROUP, 64, H, I,
                              STAGES, FORMAT)  # fmt: skip
            used += STEPS


@gluon.jit
def up_tile(scale, order, act, place, row, first, alpha, limit, beta, w_smem, x_smem, full, empty, used,
            GROUP: gl.constexpr, ROWS: gl.constexpr, H: gl.constexpr, I: gl.constexpr,  # noqa: E741
            STAGES: gl.constexpr, FORMAT: gl.constexpr):  # fmt: skip
    """swiglu of 64 columns from `first` on, for ROWS places."""
    PER: gl.constexpr = numbers_per_word(FORMAT)
    at = scale_at(scale, row, H, FORMAT)
    gate, up = products(at, at + I * (H // 32), w_smem, x_smem, full, empty, used, GROUP, ROWS, H // (64 * PER), STAGES,
                        FORMAT)  # fmt: skip
    layout: gl.constexpr = gate.type.layout
    gate = gl.minimum(gate.to(gl.bfloat16).to(gl.float32), limit)  # the projection's own rounding
    up = gl.minimum(gl.maximum(up.to(gl.bfloat16).to(gl.float32), -limit), limit)
    result = gate / (1.0 + gl.exp(-alpha * gate)) * (up + beta)
    # Where a column stands in the order of the products: `column_of` the other way round.
    column = first + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    word = column % (64 * PER) // PER
    own = word // 32 * 32 + word % 8 // 2 * 8 + word % 32 // 8 * 2 + word % 2
    position = column // (64 * PER) * (64 * PER) + column % PER * 64 + own
    m = place + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    used_place = gl.load(order + m) >= 0
    to = act + (m.to(gl.int64) * I)[None, :] + position[:, None]
    gl.store(to, result.to(gl.bfloat16), mask=used_place[None, :])


@gluon.jit
def down_tile(scale, order, y, place, row, first, w_smem, x_smem, full, empty, used, GROUP: gl.constexpr,
              ROWS: gl.constexpr, H: gl.constexpr, I: gl.constexpr, STAGES: gl.constexpr,  # noqa: E741
              FORMAT: gl.constexpr):  # fmt: skip
    """128 numbers from `first` on of y, for ROWS places."""
    at = scale_at(scale, row, I, FORMAT)
    low, high = products(at, at + 64 * (I // 32), w_smem, x_smem, full, empty, used, GROUP, ROWS,
                         I // (64 * numbers_per_word(FORMAT)), STAGES, FORMAT)  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    pair = gl.load(order + place + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout)))
    h = first + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    to = y + (pair.to(gl.int64) * H)[None, :] + h[:, None]
    gl.store(to, gl.convert_layout(low.to(gl.bfloat16), layout), mask=(pair >= 0)[None, :])
    gl.store(to + 64, gl.convert_layout(high.to(gl.bfloat16), layout), mask=(pair >= 0)[None, :])


@gluon.jit
def products(scale_a, scale_b, w_smem, x_smem, full, empty, used, GROUP: gl.constexpr, ROWS: gl.constexpr,
             STEPS: gl.constexpr, STAGES: gl.constexpr, FORMAT: gl.constexpr):  # fmt: skip
    """A group's two blocks of 64 weight rows times ROWS rows of x, fp32 [64, ROWS] each; `used` stages before."""
    PER: gl.constexpr = numbers_per_word(FORMAT)
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    acc_a = gl.zeros([64, ROWS], gl.float32, sums)
    acc_b = gl.zeros([64, ROWS], gl.float32, sums)
    next_a = gl.load(scale_a)
    next_b = gl.load(scale_b)
    for step in range(STEPS):
        stage = (used + step) % STAGES
        factor_a = spread(next_a, FORMAT)
        factor_b = spread(next_b, FORMAT)
        ahead = gl.minimum(step + 1, STEPS - 1) * (2 * PER)
        next_a = gl.load(scale_a + ahead)
        next_b = gl.load(scale_b + ahead)
        mbarrier.wait(full.index(stage), (used + step) // STAGES & 1)
        words_a = w_smem.index(stage * 4 + 2 * GROUP).load(WORDS)
        words_b = w_smem.index(stage * 4 + 2 * GROUP + 1).load(WORDS)
        for n in gl.static_range(PER):
            rows = x_smem.index(stage * PER + n).slice(0, ROWS).permute((1, 0))
            # One product runs on while the next first operand is made; the last is waited for: with products under way
            # from one step to the next the assembler puts a wait behind every single one.
            a = first_operand(words_a, factor_a, n, FORMAT, operand)
            running_a = warpgroup_mma(a, rows, acc_a, is_async=True)
            acc_a, acc_b = warpgroup_mma_wait(1, deps=[running_a, acc_b])
            b = first_operand(words_b, factor_b, n, FORMAT, operand)
            running_b = warpgroup_mma(b, rows, acc_b, is_async=True)
            acc_a, acc_b = warpgroup_mma_wait(1 if n < PER - 1 else 0, deps=[acc_a, running_b])
        mbarrier.arrive(empty.index(stage), count=1)
    return acc_a * UNSCALE, acc_b * UNSCALE


@gluon.jit
def first_operand(words, factor, n: gl.constexpr, FORMAT: gl.constexpr, layout: gl.constexpr):
    """Number n of each word, in registers as the matrix units take them."""
    wide = widen_word(words, factor, n, FORMAT, False)
    wide = gl.reshape(gl.permute(gl.reshape(wide, [64, 2, 4, 4, 2]), [0, 1, 3, 2, 4]), [64, 64])
    return gl.convert_layout(wide, layout, assert_trivial=True)


@gluon.jit
def spread(scale, FORMAT: gl.constexpr):
    """Scales of the groups of 64 rows to what each word is multiplied by."""
    groups: gl.constexpr = 2 * numbers_per_word(FORMAT)
    layout: gl.constexpr = GROUPS_OF_8 if FORMAT == "e2m1" else GROUPS_OF_16
    bits = gl.expand_dims(multiplier(scale, FORMAT, 32), 2)
    wide, _ = gl.broadcast(bits, gl.zeros([64, groups, 64 // groups], gl.int16, layout))
    return gl.convert_layout(gl.reshape(wide, [64, 64]), WORDS, assert_trivial=True)


@gluon.jit
def scale_at(scale, row, COLUMNS: gl.constexpr, FORMAT: gl.constexpr):
    """Where the scales of the first step stand, for 64 rows from `row` on."""
    layout: gl.constexpr = gl.SliceLayout(2, GROUPS_OF_8 if FORMAT == "e2m1" else GROUPS_OF_16)
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    g = gl.arange(0, 2 * numbers_per_word(FORMAT), layout=gl.SliceLayout(0, layout))
    return scale + ((row + r).to(gl.int64) * (COLUMNS // 32))[:, None] + g[None, :]
