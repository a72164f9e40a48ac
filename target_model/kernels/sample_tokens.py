"""Gumbel-coupled sampling over the whole vocabulary without sorting it.

    token[n] = argmax_v  x[n, v] + gumbel(seed, choice, position, v)  over x >= threshold[n],   x = logits / temperature; ties: lower id
N rows, V vocabulary, S splits of it. Temperature 0 is greedy: no noise, no filter. The noise is Philox4x32-10 with counter (v // 4, position,
choice, 0) and the seed as key, u = (bits >> 9 + 1/2) / 2^23. Filters are thresholds on the value, so equal values stay or go together:
    top-k   the largest u with at least k values >= u
    top-p   the largest u whose values >= u hold top_p of the mass that top-k left (ties at its border counted up to k)
    min-p   max + log(min_p)
found by bisection on the bits of the floats, a pass over the row for each step (the row stays in the L2 cache).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from target_model.kernels.common import PDL, cdiv, launch_options, power_of_two, require_tensor

BLOCK = 4096


@triton.jit
def ordered(x):
    """int32 keys in the order of the floats."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def scaled_tile(row, first, V, temperature, BLOCK: tl.constexpr):
    v = first + tl.arange(0, BLOCK)
    return tl.load(row + v, mask=v < V, other=float("-inf")).to(tl.float32) / temperature


@triton.jit
def weight_above(row, V, temperature, key, top, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Number of values whose key is at least `key`, or with MASS the sum of exp(x - top) over them."""
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        x = scaled_tile(row, first, V, temperature, BLOCK)
        weight = tl.exp(x - top) if MASS else 1.0
        total += tl.where(ordered(x) >= key, weight, 0.0)
    return tl.sum(total, 0)


@triton.jit
def largest_key(row, V, temperature, low, high, goal, top, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key that weight_above of at least `goal` allows: between `low` (which does) and `high` (which does not)."""
    found = goal - 1
    while (found != goal) & (high > low + 1):
        middle = (low & high) + ((low ^ high) >> 1)
        weight = weight_above(row, V, temperature, middle, top, MASS, BLOCK)
        if weight >= goal:
            low = middle
            found = weight
        else:
            high = middle
    return low


@triton.jit
def threshold_kernel(
    logits,  # [N, V]
    temperatures,  # fp32 [N]
    top_k,  # int32 [N], 0: off
    top_p,  # fp32 [N]
    min_p,  # fp32 [N]
    thresholds,  # fp32 [N]
    V,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0)
    row = logits + n.to(tl.int64) * V
    temperature = tl.load(temperatures + n)
    k = tl.load(top_k + n)
    p = tl.load(top_p + n)
    smallest = tl.load(min_p + n)
    if (temperature == 0.0) | ((k <= 0) & (p >= 1.0) & (smallest <= 0.0)):
        tl.store(thresholds + n, float("-inf"))
        return
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, V, BLOCK):
        best = tl.maximum(best, scaled_tile(row, first, V, temperature, BLOCK))
    top = tl.max(best, 0)
    # Keys as one-element tensors, so that scalars and bits convert alike everywhere.
    high = tl.max(ordered(best), 0) + 1
    low = tl.min(ordered(tl.full([BLOCK], -3.0e38, tl.float32)), 0)
    if (k > 0) & (k < V):
        low = largest_key(row, V, temperature, low, high, k.to(tl.float32), top, False, BLOCK)
        mass = weight_above(row, V, temperature, low + 1, top, True, BLOCK)
        above = weight_above(row, V, temperature, low + 1, top, False, BLOCK)
        bits = low ^ ((low >> 31) & 0x7FFFFFFF)
        border = (tl.zeros([BLOCK], tl.int32) + bits).to(tl.float32, bitcast=True)
        mass += (k.to(tl.float32) - above) * tl.max(tl.exp(border - top), 0)
    else:
        mass = weight_above(row, V, temperature, low, top, True, BLOCK)
    if p < 1.0:
        low = tl.maximum(low, largest_key(row, V, temperature, low, high, p * mass, top, True, BLOCK))
    bits = low ^ ((low >> 31) & 0x7FFFFFFF)
    limit = tl.max((tl.zeros([BLOCK], tl.int32) + bits).to(tl.float32, bitcast=True), 0)
    if smallest > 0.0:
        limit = tl.maximum(limit, top + tl.log(smallest))
    tl.store(thresholds + n, limit)


@triton.jit
def sample_kernel(
    logits,  # [N, V]
    temperatures,  # fp32 [N]
    thresholds,  # fp32 [N]
    seeds,  # int64 [N]
    choices,  # int64 [N]
    positions,  # int64 [N]
    best_value,  # fp32 [N, S]
    best_token,  # int64 [N, S]
    V,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0)
    row = logits + n.to(tl.int64) * V
    temperature = tl.load(temperatures + n)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    noisy = temperature != 0.0
    scale = tl.where(noisy, temperature, 1.0)
    threshold = tl.load(thresholds + n)
    same = word * 0
    position = tl.load(positions + n).to(tl.int32)
    choice = tl.load(choices + n).to(tl.int32)
    words = tl.philox(tl.load(seeds + n), word, same + position, same + choice, same)
    value = tl.full([WORDS], float("-inf"), tl.float32)
    token = tl.zeros([WORDS], tl.int32)
    for i in tl.static_range(4):
        v = word * 4 + i
        x = tl.load(row + v, mask=v < V, other=float("-inf")).to(tl.float32) / scale
        uniform = ((words[i] >> 9).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
        noise = tl.where(noisy, -tl.log(-tl.log(uniform)), 0.0)
        x = tl.where(x >= threshold, x + noise, float("-inf"))
        token = tl.where(x > value, v, token)
        value = tl.maximum(value, x)
    best = tl.max(value, 0)
    to = n.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_value + to, best)
    tl.store(best_token + to, tl.min(tl.where(value == best, token, 0x7FFFFFFF), 0).to(tl.int64))


@triton.jit
def join_kernel(
    best_value,  # fp32 [N, S]
    best_token,  # int64 [N, S]
    tokens,  # int64 [N]
    splits,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    value = tl.load(best_value + n * splits + s, mask=s < splits, other=float("-inf"))
    token = tl.load(best_token + n * splits + s, mask=s < splits, other=0)
    first = tl.min(tl.where(value == tl.max(value, 0), s, SPLITS), 0)  # splits are in the order of ids
    tl.store(tokens + n, tl.sum(tl.where(s == first, token, 0), 0))


def sample_tokens(
    logits_NV: Tensor,
    temperature_N: Tensor,
    top_k_N: Tensor,
    top_p_N: Tensor,
    min_p_N: Tensor,
    seed_N: Tensor,
    choice_N: Tensor,
    position_N: Tensor,
) -> Tensor:
    """The token of every row, int64 [N]. `position_N` is that of the chosen token; `seed_N` holds 64 bits as int64."""
    rows, vocab = logits_NV.shape
    require_tensor("logits", logits_NV, (None, None), (torch.float32, torch.bfloat16, torch.float16))
    for name, x in (("temperature", temperature_N), ("top_p", top_p_N), ("min_p", min_p_N)):
        require_tensor(name, x, (rows,), (torch.float32,))
    require_tensor("top_k", top_k_N, (rows,), (torch.int32,))
    for name, x in (("seed", seed_N), ("choice", choice_N), ("position", position_N)):
        require_tensor(name, x, (rows,), (torch.int64,))
    thresholds = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    block = min(BLOCK, power_of_two(vocab))
    threshold_kernel[(rows,)](
        logits_NV, temperature_N, top_k_N, top_p_N, min_p_N, thresholds, vocab, BLOCK=block, PDL=PDL, **launch_options(16, 1)
    )
    words = min(1024, power_of_two(cdiv(vocab, 4)))
    splits = cdiv(cdiv(vocab, 4), words)
    best_value = torch.empty(rows, splits, dtype=torch.float32, device=logits_NV.device)
    best_token = torch.empty(rows, splits, dtype=torch.int64, device=logits_NV.device)
    sample_kernel[(rows, splits)](
        logits_NV, temperature_N, thresholds, seed_N, choice_N, position_N, best_value, best_token, vocab, WORDS=words, PDL=PDL,
        **launch_options(4, 1),
    )  # fmt: skip
    tokens = torch.empty(rows, dtype=torch.int64, device=logits_NV.device)
    join_kernel[(rows,)](
        best_value, best_token, tokens, splits, SPLITS=power_of_two(splits), PDL=PDL, **launch_options(1, 1)
    )
    return tokens
