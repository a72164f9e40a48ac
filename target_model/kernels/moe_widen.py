"""Microscaled weights on their way into the matrix units: 16-bit words of packed numbers, widened in registers.

A word holds four e2m1 numbers (MXFP4, NVFP4) or two e4m3 numbers (MXFP8, FP8), the lowest bits first. Number n of every
word is plane n of a weight, and a product is the sum of the products of the planes, each with its own columns of the
other operand: nothing is interleaved. Sign, exponent and mantissa are moved to their places in bf16, where they mean
value * 2^-126 (e2m1) or value * 2^-120 (e4m3), subnormal numbers included, so that one packed multiplication by the
group's scale times 2^126 (2^120) gives the weight: about four instructions for two numbers.

The multiplier must fit bf16, so weights come out multiplied by 2^-16, and the caller multiplies the sums by UNSCALE.
E8M0 scales from 2^-100 to 2^17 are exact; larger ones become infinite. The codes of NaN in e4m3 read as +-480.

Order of columns. In the first operand of a matrix unit a thread holds RUN neighbours of every 4 RUN columns (2 in the
instructions of four warps together, 4 in those of one warp), so it would hold some words of each of several groups. The
words of BLOCK_K columns are therefore dealt out in another order (`own_order`), in which a thread holds 8 words that
stand side by side in memory: wide loads, and one scale for all of them. The other operand is stored in that order
(`column_of`): blocks of BLOCK_K columns, in them plane after plane.
"""

import triton
import triton.language as tl

from target_model.kernels.common import begin

UNSCALE = tl.constexpr(65536.0)
# Columns that one program puts in order.
ARRANGED_AT_ONCE = 1024


@triton.constexpr_function
def numbers_per_word(form: str) -> int:
    """Numbers in one element of a weight as the kernels read it; 1 for weights that are not packed."""
    return {"none": 1, "e4m3": 2, "e2m1": 4}[form]


@triton.jit
def column_of(position, PER: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr):
    """The column that stands at `position` of a row in the order of the products."""
    if PER == 1:
        return position
    else:
        WORDS: tl.constexpr = BLOCK_K // PER
        inner = position % BLOCK_K
        k = inner % WORDS
        word = k // 32 * 32 + k // RUN % 4 * 8 + k // (4 * RUN) % (8 // RUN) * RUN + k % RUN
        return position - inner + word * PER + inner // WORDS


@triton.jit
def own_order(x, ROWS: tl.constexpr, WORDS: tl.constexpr, RUN: tl.constexpr):
    """Words [ROWS, WORDS] in the order of the products."""
    x = tl.reshape(x, [ROWS, WORDS // 32, 4, 8 // RUN, RUN])
    return tl.reshape(tl.permute(x, [0, 1, 3, 2, 4]), [ROWS, WORDS])


@triton.jit
def arrange(x, out, chunk, H: tl.constexpr, HP: tl.constexpr, PER: tl.constexpr, BLOCK_K: tl.constexpr,
            RUN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Chunk number `chunk` of x [T, H] to out [T, HP] in the order of the products. HP: H up to whole BLOCK_K."""
    CHUNKS: tl.constexpr = (HP + BLOCK - 1) // BLOCK
    t = (chunk // CHUNKS).to(tl.int64)
    position = chunk % CHUNKS * BLOCK + tl.arange(0, BLOCK)
    column = column_of(position, PER, BLOCK_K, RUN)
    values = tl.load(x + t * H + column, mask=(position < HP) & (column < H), other=0.0)
    tl.store(out + t * HP + position, values, mask=position < HP)


@triton.jit
def arrange_kernel(
    x,  # [T, H]
    out,  # [T, HP]
    H: tl.constexpr,
    HP: tl.constexpr,
    PER: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    arrange(x, out, tl.program_id(0), H, HP, PER, BLOCK_K, RUN, BLOCK)


@triton.jit
def prefetch_rows(weights, start, first, count, WORDS: tl.constexpr, ROWS: tl.constexpr):
    """Brings rows start + first .. start + first + ROWS of a weight [.., WORDS] to the L2, up to start + count."""
    row = tl.minimum(first + tl.arange(0, ROWS), count - 1).to(tl.int64)
    prefetch(weights.to(tl.int64) + (start + row) * (2 * WORDS), 2 * WORDS, ROWS)


@triton.jit
def prefetch(address, BYTES: tl.constexpr, COUNT: tl.constexpr):
    """Brings BYTES from each of COUNT addresses to the L2; all are multiples of 16."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r",
        [address, tl.full([COUNT], BYTES, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def multiplier(scale, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """Bytes of group scales (E8M0 for 32 columns, e4m3 for 16) to the bits (int16) of the bf16 that `widen_word` takes:
    scale * 2^(126 - 16), or 2^(120 - 16).
    """
    if GROUP == 16:
        wide = ((scale.to(tl.int32) & 128) << 24 | (scale.to(tl.int32) & 127) << 20).to(tl.float32, bitcast=True)
        wide = wide * 1.329227995784916e36 * 1.298074214633707e33  # 2^120: what the bits mean; 2^110
        return (wide.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    else:
        BIAS: tl.constexpr = 110 if FORMAT == "e2m1" else 104
        return (tl.minimum(scale.to(tl.int32) + BIAS, 255) << 7).to(tl.int16)


@triton.jit
def widen_word(word, factor, N: tl.constexpr, FORMAT: tl.constexpr, UPCAST: tl.constexpr):
    """Number N of each word (int16) times the bf16 whose bits are `factor` (int16): bf16, in the interpreter fp32."""
    if UPCAST:
        return _by_arithmetic(word, factor, N, FORMAT)
    elif FORMAT == "e2m1":
        return _e2m1(word, factor, N)
    else:
        return _e4m3(word, factor, N)


@triton.jit
def _by_arithmetic(word, factor, N: tl.constexpr, FORMAT: tl.constexpr):
    """The same numbers in fp32, whose exponent is as wide as that of bf16."""
    if FORMAT == "e2m1":
        code = word.to(tl.int32) >> (4 * N)
        bits = ((code & 8) << 28) | ((code & 7) << 22)
    else:
        code = word.to(tl.int32) >> (8 * N)
        bits = ((code & 128) << 24) | ((code & 127) << 20)
    return bits.to(tl.float32, bitcast=True) * (factor.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(word, factor, N: tl.constexpr):
    # Two words in a register; s|eem goes to bit 15 and to bits 8..6 of each half. A product with the sum of two powers
    # of two puts copies of the number at both places at once, where it stays inside its half. Numbers 2 and 3 share a
    # shift.
    if N == 0:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a; and.b32 a, $1, 0x000F000F; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81C081C0;"
            "mul.bf16x2 $0, a, $2; }",
            "=r,r,r", [word, factor], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    elif N == 1:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a; and.b32 a, $1, 0x00F000F0; mul.lo.u32 a, a, 0x104; and.b32 a, a, 0x81C081C0;"
            "mul.bf16x2 $0, a, $2; }",
            "=r,r,r", [word, factor], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    elif N == 2:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a; shr.b32 a, $1, 8; and.b32 a, a, 0x000F000F; mul.lo.u32 a, a, 0x1040;"
            "and.b32 a, a, 0x81C081C0; mul.bf16x2 $0, a, $2; }",
            "=r,r,r", [word, factor], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a; shr.b32 a, $1, 8; and.b32 a, a, 0x00F000F0; mul.lo.u32 a, a, 0x104;"
            "and.b32 a, a, 0x81C081C0; mul.bf16x2 $0, a, $2; }",
            "=r,r,r", [word, factor], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _e4m3(word, factor, N: tl.constexpr):
    # s|eeeemmm goes to bit 15 and to bits 10..4 of each half.
    if N == 0:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; shl.b32 a, $1, 4; and.b32 a, a, 0x07F007F0; shl.b32 b, $1, 8;"
            "lop3.b32 a, b, 0x80008000, a, 0xEA; mul.bf16x2 $0, a, $2; }",
            "=r,r,r", [word, factor], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a; shr.b32 a, $1, 4; and.b32 a, a, 0x07F007F0;"
            "lop3.b32 a, $1, 0x80008000, a, 0xEA; mul.bf16x2 $0, a, $2; }",
            "=r,r,r", [word, factor], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
