"""What the Triton kernel files here share: which rows and keys a program has, the online softmax step, argument checks,
and how programs are launched.

Kernels are written once and run in three places: compiled on CUDA, compiled without a GPU (a test), and in Triton's CPU
interpreter. The interpreter computes bf16 wrongly, so there every load is widened to fp32 (`UPCAST`).
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
PDL = not INTERPRETED
LOG2_E = 1.4426950408889634


@triton.jit
def begin(PDL: tl.constexpr):
    """First line of a kernel: waits until the one before in the stream has ended, then lets the next one start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def sequence_rows(row_start, r, ONE: tl.constexpr):
    """First row of sequence r in the batch, and how many rows it has; ONE: every sequence has one, nothing is read."""
    if ONE:
        return r, 1
    start = tl.load(row_start + r)
    return start, tl.load(row_start + r + 1) - start


@triton.jit
def ends_of_keys(slots, known, first, end, TREE: tl.constexpr):
    """The least and the greatest of the ends of the keys that rows first..end-1 of the batch see, with TREE without
    the scratch slots: `known` for all.

    The bounds of loops come from loads of one value, not from a reduction over rows: then the compiler knows that they
    are the same in all threads and keeps addresses in uniform registers.
    """
    if TREE:
        return known, known
    return tl.load(slots + first).to(tl.int32) + 1, tl.load(slots + end - 1).to(tl.int32) + 1


@triton.jit
def split_range(split, share, total, full):
    """The range low..high-1 of `total` tiles that a split with `share` of them takes, and its `middle`: those below it
    are among the first `full`."""
    low = split * share
    high = tl.minimum(low + share, total)
    return low, tl.maximum(tl.minimum(high, full), low), high


@triton.jit
def widen(x, UPCAST: tl.constexpr):
    """fp32 in the interpreter, unchanged on the GPU."""
    if UPCAST:
        return x.to(tl.float32)
    return x


@triton.jit
def to_dot(x, like, UPCAST: tl.constexpr):
    """A cache tile (bf16, fp32 or fp8) in the dtype of the query tile it is multiplied with."""
    if UPCAST:
        return x.to(tl.float32)
    return x.to(like.dtype)


@triton.jit
def softmax_start(M: tl.constexpr, D: tl.constexpr):
    """row_max [M], row_sum [M] and acc [M, D] of `softmax_step` before the first tile."""
    return tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, D], tl.float32)


@triton.jit
def softmax_step(scores, v, row_max, row_sum, acc, row_on, scale, UPCAST: tl.constexpr):
    """One tile of keys of the online softmax, base 2. scores [M, N] are unscaled; row_max is in units of scores *
    scale.

    Rows with `row_on` false (they did not choose this tile's block) and rows without a visible key stay unchanged.
    """
    tile_max = tl.where(row_on, tl.max(scores, 1) * scale, float("-inf"))
    new_max = tl.maximum(row_max, tile_max)
    base = tl.where(row_on & (new_max > float("-inf")), new_max, float("inf"))  # exp2(x - inf) = 0
    p = tl.exp2(scores * scale - base[:, None])
    decay = tl.where(new_max == row_max, 1.0, tl.exp2(row_max - base))
    row_sum = row_sum * decay + tl.sum(p, 1)
    acc = acc * decay[:, None]
    if UPCAST:
        acc += tl.dot(p, v, input_precision="ieee")
    else:
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return new_max, row_sum, acc


def require(condition: bool, message: str) -> None:
    """Wrong arguments of a kernel are programming errors: one clear line."""
    if not condition:
        raise ValueError(message)


def require_tensor(
    name: str, x: Tensor, shape: tuple, dtypes: tuple[torch.dtype, ...], *, contiguous: bool = True
) -> None:
    """Checks shape (None = any), dtype, contiguity (else: a contiguous last dimension)."""
    matches = x.dim() == len(shape) and all(
        want is None or want == have for want, have in zip(shape, x.shape, strict=True)
    )
    require(matches, f"{name} has shape {tuple(x.shape)}, expected {shape}")
    require(x.dtype in dtypes, f"{name} has dtype {x.dtype}, expected one of {dtypes}")
    if contiguous:
        require(x.is_contiguous(), f"{name} must be contiguous, its strides are {x.stride()}")
    else:
        require(x.stride(-1) == 1, f"{name} must be contiguous in its last dimension, its strides are {x.stride()}")


FLOATS = (torch.bfloat16, torch.float16, torch.float32)
POOL_FLOATS = (*FLOATS, torch.float8_e4m3fn)


def power_of_two(value: int) -> int:
    return triton.next_power_of_2(value)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def launch_options(num_warps: int, num_stages: int, registers: int | None = None) -> dict:
    """Launch keywords. Every kernel is a programmatic dependent launch: it may start while the one before it in the
    stream still runs, and waits (`gdc_wait`) before it touches memory."""
    options: dict = {"num_warps": num_warps, "num_stages": num_stages}
    if INTERPRETED:
        return options
    options["launch_pdl"] = True
    if registers is not None:
        options["maxnreg"] = registers
    return options
