"""Gumbel-coupled sampling over the whole vocabulary without sorting it.

    token[n] = argmax_v  x[n, v] + gumbel(seed, choice, position, v)  over x >= threshold[n],   x = logits /
                         temperature; ties: lower id
N rows, V vocabulary, S chunks of it, K candidates a chunk. Temperature 0 is greedy: no noise, no filter. The noise is
that of gumbel.py. Filters are thresholds on the value, so equal values stay or go together:
    top-k   the largest u with at least k values >= u
    top-p   the largest u whose values >= u hold top_p of the mass that top-k left (ties at its border counted up to k)
    min-p   max + log(min_p)
Three launches. A program of `candidates_kernel` takes one chunk: of a row that has filters it keeps the K largest
values and says from which key on these are all that the chunk has; of a row without it keeps the one best, noise
included. A program of `decide_kernel` finds the thresholds of a row among its S * K candidates and chooses. Where they
cannot tell (many equal values, top-p on a flat row) it searches the whole row, and `rest_kernel` chooses.
A chunk is made of pieces from all over the row, since likely tokens crowd at low ids. All sums are in a fixed order, so
a seed gives the same text every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from target_model.kernels.common import FLOATS, PDL, cdiv, launch_options, power_of_two, require_tensor
from target_model.kernels.gumbel import noise_at, noise_tile
from target_model.kernels.sample_tokens_filters import find_in_row, find_threshold, has_filters, scaled_tile
from target_model.kernels.top_rows import NOTHING, largest_key, ordered, places, sum_of_exponentials, unordered

CHUNK, PIECE, CANDIDATES = 4096, 64, 64
WARPS = 8
DECIDED = tl.constexpr(float("inf"))  # threshold of a row that `decide_kernel` has finished
NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def first_best(value, ids):
    """(largest key, lowest id that has it)."""
    key = ordered(value)
    best = tl.max(key, 0)
    return best, tl.min(tl.where(key == best, ids, NO_ID), 0)


@triton.jit
def candidates_kernel(
    logits,  # [N, V]
    temperatures,  # fp32 [N]
    top_k,  # int32 [N], 0: off
    top_p,  # fp32 [N]
    min_p,  # fp32 [N]
    seeds,  # int64 [N]
    choices,  # int64 [N]
    positions,  # int64 [N]
    keys,  # int32 [N, S, K]
    tokens,  # int32 [N, S, K]
    complete,  # int32 [N, S]
    maxima,  # fp32 [N, S]
    sums,  # fp32 [N, S]
    V,
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n, chunk, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(temperatures + n)
    i = tl.arange(0, CHUNK)
    v = i // PIECE * (PIECE * splits) + chunk * PIECE + i % PIECE
    x = tl.load(logits + n * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
    x = tl.div_rn(x, tl.where(temperature == 0.0, 1.0, temperature))
    to = n * splits + chunk
    filters = has_filters(tl.load(top_k + n), tl.load(top_p + n), tl.load(min_p + n), V)
    if (temperature == 0.0) | (not filters):
        if temperature != 0.0:
            w = tl.arange(0, CHUNK // 4)
            word = w // (PIECE // 4) * (PIECE // 4 * splits) + chunk * (PIECE // 4) + w % (PIECE // 4)
            x += noise_tile(tl.load(seeds + n), tl.load(choices + n), tl.load(positions + n), word)
        best, token = first_best(x, v)
        tl.store(keys + to * K, best)
        tl.store(tokens + to * K, token)
    else:
        top, total = sum_of_exponentials(x)
        tl.store(maxima + to, top)
        tl.store(sums + to, total)
        key = tl.where(v < V, ordered(x), NOTHING)
        low = largest_key(key, K, K)
        place = places(key, low, K)
        tl.store(keys + to * K + place, key, mask=place < K)
        tl.store(tokens + to * K + place, v, mask=place < K)
        tl.store(complete + to, low + (tl.sum((key >= low).to(tl.int32), 0) > K).to(tl.int32))


@triton.jit
def decide_kernel(
    logits,  # [N, V]
    temperatures,  # fp32 [N]
    top_k,  # int32 [N], 0: off
    top_p,  # fp32 [N]
    min_p,  # fp32 [N]
    seeds,  # int64 [N]
    choices,  # int64 [N]
    positions,  # int64 [N]
    keys,  # int32 [N, S, K]
    tokens,  # int32 [N, S, K]
    complete,  # int32 [N, S]
    maxima,  # fp32 [N, S]
    sums,  # fp32 [N, S]
    thresholds,  # fp32 [N]
    best,  # int64 [N]
    arrived,  # int32 [N]
    chosen,  # int64 [N]
    V,
    splits,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + n)
    k, p, smallest = tl.load(top_k + n), tl.load(top_p + n), tl.load(min_p + n)
    k = tl.where(k >= V, 0, k)
    s = tl.arange(0, SPLITS)
    threshold = DECIDED
    if (temperature == 0.0) | (not has_filters(k, p, smallest, V)):
        bests = tl.load(keys + (n * splits + s) * K, mask=s < splits, other=NOTHING)
        first = tl.load(tokens + (n * splits + s) * K, mask=s < splits, other=NO_ID)
        tl.store(chosen + n, tl.min(tl.where(bests == tl.max(bests, 0), first, NO_ID), 0).to(tl.int64))
    else:
        i = tl.arange(0, WIDTH)
        key = tl.load(keys + n * splits * K + i, mask=i < splits * K, other=NOTHING)
        token = tl.load(tokens + n * splits * K + i, mask=i < splits * K, other=NO_ID)
        all_from = tl.max(tl.load(complete + n * splits + s, mask=s < splits, other=NOTHING), 0)
        highest = tl.max(key, 0)
        tops = tl.load(maxima + n * splits + s, mask=s < splits, other=float("-inf"))
        total = tl.load(sums + n * splits + s, mask=s < splits, other=0.0)
        mass = tl.sum(total * tl.exp(tops - unordered(highest)), 0)
        low, right = find_threshold(key, all_from, mass, k, p, smallest, K)
        if right:
            kept = (key >= low) & (key > NOTHING)
            noise = noise_at(tl.load(seeds + n), tl.load(choices + n), tl.load(positions + n), token)
            noisy = tl.where(kept, unordered(key) + noise, float("-inf"))
            most, winner = first_best(noisy, tl.where(kept, token, NO_ID))
            tl.store(chosen + n, winner.to(tl.int64))
        else:
            threshold = find_in_row(logits + n * V, V, temperature, highest, mass, k, p, smallest, BLOCK)
            tl.store(best + n, tl.full([], -(2**63), tl.int64))
            tl.store(arrived + n, 0)
    tl.store(thresholds + n, threshold)


@triton.jit
def rest_kernel(
    logits,  # [N, V]
    temperatures,  # fp32 [N]
    thresholds,  # fp32 [N]
    seeds,  # int64 [N]
    choices,  # int64 [N]
    positions,  # int64 [N]
    best,  # int64 [N], key and id
    arrived,  # int32 [N]
    chosen,  # int64 [N]
    V,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    threshold = tl.load(thresholds + n)
    if threshold < DECIDED:
        v = chunk * CHUNK + tl.arange(0, CHUNK)
        x = scaled_tile(logits + n * V, chunk * CHUNK, V, tl.load(temperatures + n), CHUNK)
        word = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
        noise = noise_tile(tl.load(seeds + n), tl.load(choices + n), tl.load(positions + n), word)
        key, token = first_best(tl.where(x >= threshold, x + noise, float("-inf")), v)
        tl.atomic_max(best + n, (key.to(tl.int64) << 32) | (token ^ NO_ID))
        if tl.atomic_add(arrived + n, 1) == tl.num_programs(1) - 1:
            winner = tl.atomic_add(best + n, tl.full([], 0, tl.int64))
            tl.store(chosen + n, (winner & 0xFFFFFFFF) ^ NO_ID)


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
    require_tensor("logits", logits_NV, (None, None), FLOATS)
    for name, x in (("temperature", temperature_N), ("top_p", top_p_N), ("min_p", min_p_N)):
        require_tensor(name, x, (rows,), (torch.float32,))
    require_tensor("top_k", top_k_N, (rows,), (torch.int32,))
    for name, x in (("seed", seed_N), ("choice", choice_N), ("position", position_N)):
        require_tensor(name, x, (rows,), (torch.int64,))

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits_NV.device)

    chunk = min(CHUNK, max(CANDIDATES, power_of_two(vocab)))
    splits = cdiv(vocab, chunk)
    filters, noise = (temperature_N, top_k_N, top_p_N, min_p_N), (seed_N, choice_N, position_N)
    found = (
        *(new(rows, splits, CANDIDATES) for _ in range(2)),
        new(rows, splits),
        *(new(rows, splits, dtype=torch.float32) for _ in range(2)),
    )
    candidates_kernel[(rows, splits)](
        logits_NV, *filters, *noise, *found, vocab,
        CHUNK=chunk, PIECE=PIECE, K=CANDIDATES, PDL=PDL, **launch_options(WARPS, 1),
    )  # fmt: skip
    thresholds, best, arrived = new(rows, dtype=torch.float32), new(rows, dtype=torch.int64), new(rows)
    chosen_N = new(rows, dtype=torch.int64)
    decide_kernel[(rows,)](
        logits_NV, *filters, *noise, *found, thresholds, best, arrived, chosen_N, vocab, splits,
        SPLITS=power_of_two(splits), WIDTH=power_of_two(splits * CANDIDATES), K=CANDIDATES, BLOCK=chunk, PDL=PDL,
        **launch_options(WARPS, 1),
    )  # fmt: skip
    rest_kernel[(rows, splits)](
        logits_NV, temperature_N, thresholds, *noise, best, arrived, chosen_N, vocab,
        CHUNK=chunk, PDL=PDL, **launch_options(WARPS, 1),
    )  # fmt: skip
    return chosen_N
