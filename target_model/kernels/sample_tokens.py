"""Gumbel-coupled sampling over the whole vocabulary without sorting it.

    token[n] = argmax_v  x[n, v] + gumbel(seed, choice, position, v)  over x >= threshold[n],   x = logits /
                         temperature; ties: lower id
N rows, V vocabulary, S splits of it. Temperature 0 is greedy: no noise, no filter. The noise is Philox4x32-10 with
counter (v // 4, position, choice, 0) and the seed as key, u = (bits >> 9 + 1/2) / 2^23. Filters are thresholds on the
value, so equal values stay or go together:
    top-k   the largest u with at least k values >= u
    top-p   the largest u whose values >= u hold top_p of the mass that top-k left (ties at its border counted up to k)
    min-p   max + log(min_p)
The row is read twice and a half: once for the maxima of GROUPS interleaved groups, whose k-th largest bounds the k-th
largest value from below, and once to collect the values above that bound. Bisections on the bits of the floats then run
over those few CANDIDATES in registers. When they are too many (a great many equal values) or hold too little mass
(top-p without top-k on a flat row), the bisections run over the whole row. Masses are sums of integers, exp(x - max) *
2^40: they do not depend on the order of summation, so a seed gives the same text every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from target_model.kernels.common import PDL, cdiv, launch_options, power_of_two, require_tensor

GROUPS, CANDIDATES, MOST_TOP_K = 16384, 4096, 1024


@triton.jit
def ordered(x):
    """int32 keys in the order of the floats."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key, BLOCK: tl.constexpr):
    """The float of one key."""
    bits = tl.zeros([BLOCK], tl.int32) + (key ^ ((key >> 31) & 0x7FFFFFFF))
    return tl.max(bits.to(tl.float32, bitcast=True), 0)


@triton.jit
def scaled_tile(row, first, V, temperature, BLOCK: tl.constexpr):
    v = first + tl.arange(0, BLOCK)
    return tl.load(row + v, mask=v < V, other=float("-inf")).to(tl.float32) / temperature


@triton.jit
def weigh(x, key, top, MASS: tl.constexpr):
    """int64 number of values whose key is at least `key`, or with MASS the sum of their exp(x - top) in units of
    2^-40."""
    if MASS:
        weight = (tl.exp(x - top) * 1099511627776.0).to(tl.int64)
    else:
        weight = tl.full(x.shape, 1, tl.int64)
    return tl.sum(tl.where(ordered(x) >= key, weight, 0), 0)


@triton.jit
def weigh_row(row, V, temperature, key, top, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """`weigh` over a whole row."""
    total = tl.full([], 0, tl.int64)
    for first in range(0, V, BLOCK):
        total += weigh(scaled_tile(row, first, V, temperature, BLOCK), key, top, MASS)
    return total


@triton.jit
def largest_key(x, low, high, goal, top, MASS: tl.constexpr):
    """The largest key with weight(>= key) >= goal among the values x; `low` has that, `high` has not."""
    found = goal - 1
    while (found != goal) & (high > low + 1):
        middle = (low & high) + ((low ^ high) >> 1)
        weight = weigh(x, middle, top, MASS)
        if weight >= goal:
            low = middle
            found = weight
        else:
            high = middle
    return low


@triton.jit
def largest_key_row(row, V, temperature, low, high, goal, top, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """`largest_key` over a whole row."""
    found = goal - 1
    while (found != goal) & (high > low + 1):
        middle = (low & high) + ((low ^ high) >> 1)
        weight = weigh_row(row, V, temperature, middle, top, MASS, BLOCK)
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
    candidates,  # fp32 [N, CANDIDATES]
    counters,  # int32 [N], zero
    thresholds,  # fp32 [N]
    V,
    GROUPS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    MOST_TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    row = logits + n * V
    temperature = tl.load(temperatures + n)
    k = tl.load(top_k + n)
    p = tl.load(top_p + n)
    smallest = tl.load(min_p + n)
    k = tl.where(k >= V, 0, k)
    if (temperature == 0.0) | ((k <= 0) & (p >= 1.0) & (smallest <= 0.0)):
        tl.store(thresholds + n, float("-inf"))
        return
    best = tl.full([GROUPS], float("-inf"), tl.float32)
    for first in range(0, V, GROUPS):
        best = tl.maximum(best, scaled_tile(row, first, V, temperature, GROUPS))
    top = tl.max(best, 0)
    high = tl.max(ordered(best), 0) + 1
    least = tl.min(ordered(tl.full([32], -3.0e38, tl.float32)), 0)  # below every finite value

    wanted = tl.minimum(tl.minimum(tl.where(k > 0, k, MOST_TOP_K), V), GROUPS).to(tl.int64)
    bound = largest_key(best, least, high, wanted, top, False)
    for first in range(0, V, GROUPS):
        x = scaled_tile(row, first, V, temperature, GROUPS)
        hit = ordered(x) >= bound
        place = tl.atomic_add(counters + n + tl.zeros([GROUPS], tl.int32), 1, mask=hit)
        tl.store(candidates + n * CANDIDATES + place, x, mask=hit & (place < CANDIDATES))
    tl.debug_barrier()  # the candidates were stored by other threads of this program
    kept = tl.atomic_add(counters + n, 0)
    c = tl.arange(0, CANDIDATES)
    few = tl.load(candidates + n * CANDIDATES + c, mask=c < kept, other=float("-inf"), cache_modifier=".cg")

    goal = k.to(tl.int64)
    enough = (kept <= CANDIDATES) & (k <= kept)
    low = least
    if k > 0:
        if enough:
            low = largest_key(few, bound, high, goal, top, False)
            mass = weigh(few, low + 1, top, True)
            above = weigh(few, low + 1, top, False)
        else:
            low = largest_key_row(row, V, temperature, least, high, goal, top, False, GROUPS)
            mass = weigh_row(row, V, temperature, low + 1, top, True, GROUPS)
            above = weigh_row(row, V, temperature, low + 1, top, False, GROUPS)
        border = tl.exp(unordered(low, 32) - top) * 1099511627776.0
        mass += (goal - above) * border.to(tl.int64)
    else:
        mass = weigh_row(row, V, temperature, least, top, True, GROUPS)
    if p < 1.0:
        share = (mass.to(tl.float32) * p).to(tl.int64)
        if (kept <= CANDIDATES) & (weigh(few, bound, top, True) >= share):
            low = tl.maximum(low, largest_key(few, bound, high, share, top, True))
        else:
            low = tl.maximum(low, largest_key_row(row, V, temperature, least, high, share, top, True, GROUPS))
    limit = unordered(low, 32)
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
    device = logits_NV.device
    thresholds = torch.empty(rows, dtype=torch.float32, device=device)
    candidates = torch.empty(rows, CANDIDATES, dtype=torch.float32, device=device)
    counters = torch.zeros(rows, dtype=torch.int32, device=device)
    threshold_kernel[(rows,)](
        logits_NV, temperature_N, top_k_N, top_p_N, min_p_N, candidates, counters, thresholds, vocab,
        GROUPS=min(GROUPS, power_of_two(vocab)), CANDIDATES=CANDIDATES, MOST_TOP_K=MOST_TOP_K, PDL=PDL,
        **launch_options(16, 1),
    )  # fmt: skip
    words = min(1024, power_of_two(cdiv(vocab, 4)))
    splits = cdiv(cdiv(vocab, 4), words)
    best_value = torch.empty(rows, splits, dtype=torch.float32, device=device)
    best_token = torch.empty(rows, splits, dtype=torch.int64, device=device)
    sample_kernel[(rows, splits)](
        logits_NV, temperature_N, thresholds, seed_N, choice_N, position_N, best_value, best_token, vocab, WORDS=words,
        PDL=PDL,
        **launch_options(4, 1),
    )  # fmt: skip
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    join_kernel[(rows,)](
        best_value, best_token, tokens, splits, SPLITS=power_of_two(splits), PDL=PDL, **launch_options(1, 1)
    )
    return tokens
