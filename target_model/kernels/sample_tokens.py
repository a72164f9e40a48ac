"""Gumbel-coupled sampling over the whole vocabulary without sorting it.

    token[n] = argmax_v  x[n, v] + gumbel(seed, choice, position, v)  over x >= threshold[n],   x = logits /
                         temperature; ties: lower id
N rows, R settings, each for N / R consecutive rows, V vocabulary, S chunks and G groups of it. Temperature 0 is greedy:
no noise, no filter. The noise is that of gumbel.py. Filters are thresholds on the value, so equal values stay or go
together:
    top-k   the largest u with at least k values >= u
    top-p   the largest u whose values >= u hold top_p of the mass that top-k left (ties at its border counted up to k)
    min-p   max + log(min_p)
Four launches. `first_kernel` reads every row once and keeps the maximum of each group (top_rows_groups.py): of the
logits where a row is greedy or has a top-k up to MANY, else of x + noise, filters aside. In `decide_kernel` one program
a row reads only the few groups that matter: with a top-k it finds the threshold among them and chooses; else it has
the best token of all, which mostly passes the other filters. They ask how much mass (how many values) lie above the
token's own; `check_kernel` reads the row again to tell, and finds the best token above it at once. `last_kernel`
settles the rows that were open, going up from token to token where one fails.
All sums are in a fixed order, so a seed gives the same text every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from target_model.kernels.common import FLOATS, PDL, begin, cdiv, launch_options, power_of_two, require_tensor
from target_model.kernels.gumbel import noise_at, noise_tile, shared_by
from target_model.kernels.sample_tokens_filters import (
    NO_TOKEN,
    first_best,
    look_above,
    look_above_in_row,
    mass_of_best,
    passes,
)
from target_model.kernels.top_rows_groups import (
    GROUP,
    NOTHING,
    columns_of_groups,
    group_maxima,
    keep_best_groups,
    largest_key,
    ordered,
    places,
    sum_of_exponentials,
    unordered,
)

CHUNK, FIRST_WARPS, DECIDE_WARPS, LAST_WARPS = 4096, 8, 8, 8
FEW, MANY = tl.constexpr(64), tl.constexpr(256)
DONE, REJECTED = tl.constexpr(-2), tl.constexpr(-1)  # instead of a token that is to be checked


@triton.jit
def load_filters(r, temperatures, top_k, top_p, min_p, V):
    """(temperature, k or 0, p, smallest, whether the whole row gets noise) of a row."""
    temperature, k = tl.load(temperatures + r), tl.load(top_k + r)
    k = tl.where((k < 0) | (k >= V), 0, k)
    whole = (temperature != 0.0) & ((k == 0) | (k > MANY))
    return temperature, k, tl.load(top_p + r), tl.load(min_p + r), whole


@triton.jit
def load_keys(n, share, seeds, choices, positions):
    return tl.load(seeds + n // share), tl.load(choices + n // share), tl.load(positions + n)


@triton.jit(do_not_specialize=["share"])
def first_kernel(
    logits,  # [N, V]
    temperatures,  # fp32 [R]
    top_k,  # int32 [R], 0: off
    top_p,  # fp32 [R]
    min_p,  # fp32 [R]
    seeds,  # int64 [R]
    choices,  # int64 [R]
    positions,  # int64 [N]
    maxima,  # int32 [N, G], keys
    tops,  # fp32 [N, S], of x
    sums,  # fp32 [N, S], of exp(x - top)
    V,
    share,  # N / R
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    n, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, k, p, smallest, whole = load_filters(n // share, temperatures, top_k, top_p, min_p, V)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + n * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
    to = n * tl.num_programs(1) + chunk
    if whole:
        value = tl.div_rn(value, temperature)
        if (k > 0) | (p < 1.0) | (smallest > 0.0):
            top, total = sum_of_exponentials(value)
            tl.store(tops + to, top)
            tl.store(sums + to, total)
        seed, choice, position = load_keys(n, share, seeds, choices, positions)
        value += noise_tile(seed, choice, position, chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4))
    g = tl.arange(0, CHUNK // GROUP)
    key = tl.where(chunk * CHUNK + g * GROUP < V, ordered(group_maxima(value)), NOTHING)
    tl.store(maxima + to * (CHUNK // GROUP) + g, key)


@triton.jit
def best_of_all(row, maxima, groups, V, temperature, seed, choice, position, WIDTH: tl.constexpr):
    """(token, key of its x) of the largest group maximum."""
    g = tl.arange(0, WIDTH)
    key = tl.load(maxima + g, mask=g < groups, other=NOTHING)
    column = tl.min(tl.where(key == tl.max(key, 0), g, WIDTH), 0) * GROUP + tl.arange(0, GROUP)
    x = tl.load(row + column, mask=column < V, other=float("-inf")).to(tl.float32)
    noisy = x
    if temperature != 0.0:
        x = tl.div_rn(x, temperature)
        noisy = x + noise_at(seed, choice, position, column)
    best, token = first_best(noisy, tl.where(column < V, column, NO_TOKEN))
    return token, tl.max(tl.where(column == token, ordered(x), NOTHING), 0)


@triton.jit
def choose_among(
    row, maxima, scratch, groups, V, temperature, k, p, smallest, seed, choice, position, WIDTH: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """(token, key of the k-th largest x, whether all that pass the filters were at hand) of a row with a top-k <= K."""
    others = keep_best_groups(maxima, scratch, groups, WIDTH, K, K)
    column = columns_of_groups(scratch, K, K)
    x = tl.div_rn(tl.load(row + column, mask=column < V, other=float("-inf")).to(tl.float32), temperature)
    key = tl.where(column < V, ordered(x), NOTHING)
    low = largest_key(key, k, K)
    reached = tl.sum((key >= low).to(tl.int32), 0)
    place = places(key, low, K)
    tl.debug_barrier()  # all have read which groups
    tl.store(scratch + place, key, mask=place < K)
    tl.store(scratch + K + place, column, mask=place < K)
    tl.debug_barrier()  # other threads of this program read them
    best, kept, low = passes(scratch, tl.minimum(reached, K), k, p, smallest, K, 32)
    token = tl.load(scratch + K + tl.arange(0, K), mask=kept, other=NO_TOKEN, cache_modifier=".cg")
    noisy = tl.where(kept, unordered(best) + noise_at(seed, choice, position, token), float("-inf"))
    most, winner = first_best(noisy, token)
    # Of the entries that equal the k-th some may be missing: in other groups, or for want of room.
    missing = (reached > K) | ((others > NOTHING) & (low <= ordered(tl.div_rn(unordered(others), temperature))))
    ties = tl.sum((kept & (best == low)).to(tl.int32), 0)
    return winner, low, tl.where(missing, ties, 0) == 0


@triton.jit(do_not_specialize=["share"])
def decide_kernel(
    logits,  # [N, V]
    temperatures,  # fp32 [R]
    top_k,  # int32 [R], 0: off
    top_p,  # fp32 [R]
    min_p,  # fp32 [R]
    seeds,  # int64 [R]
    choices,  # int64 [R]
    positions,  # int64 [N]
    maxima,  # int32 [N, G]
    tops,  # fp32 [N, S]
    scratch,  # int32 [N, 2 * MANY]
    highest,  # fp32 [N], max of x of open rows
    bounds,  # int32 [N], only keys above it are left to an open row
    checked,  # int32 [N], the token that is to be checked, REJECTED, or DONE: the row is not open
    tokens,  # int64 [N]
    V,
    share,  # N / R
    groups,
    splits,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    n = tl.program_id(0).to(tl.int64)
    temperature, k, p, smallest, whole = load_filters(n // share, temperatures, top_k, top_p, min_p, V)
    seed, choice, position = load_keys(n, share, seeds, choices, positions)
    row, own, room = logits + n * V, maxima + n * groups, scratch + n * 2 * MANY
    state = tl.full([], DONE, tl.int32)
    bound = tl.full([], NOTHING, tl.int32)
    if (temperature == 0.0) | whole:
        token, bound = best_of_all(row, own, groups, V, temperature, seed, choice, position, WIDTH)
        if whole & ((k > 0) | (p < 1.0) | (smallest > 0.0)):
            s = tl.arange(0, SPLITS)
            top = tl.max(tl.load(tops + n * splits + s, mask=s < splits, other=float("-inf")), 0)
            tl.store(highest + n, top)
            limit = ordered(top + tl.log(tl.where(smallest > 0.0, smallest, 1.0)))
            if (smallest > 0.0) & (bound < limit):
                state, bound = tl.full([], REJECTED, tl.int32), limit - 1
            elif (k > 0) | (p < 1.0):
                state = token
    else:
        if k <= FEW:
            token, low, complete = choose_among(
                row, own, room, groups, V, temperature, k, p, smallest, seed, choice, position, WIDTH, FEW
            )  # fmt: skip
        else:
            token, low, complete = choose_among(
                row, own, room, groups, V, temperature, k, p, smallest, seed, choice, position, WIDTH, MANY
            )  # fmt: skip
        if not complete:
            state, bound = tl.full([], REJECTED, tl.int32), low - 1
    tl.store(tokens + n, token.to(tl.int64))
    tl.store(checked + n, state)
    tl.store(bounds + n, bound)


@triton.jit(do_not_specialize=["share"])
def check_kernel(
    logits,  # [N, V]
    temperatures,  # fp32 [R]
    seeds,  # int64 [R]
    choices,  # int64 [R]
    positions,  # int64 [N]
    highest,  # fp32 [N]
    bounds,  # int32 [N]
    checked,  # int32 [N]
    found,  # int32 [3, N, S], of the keys above the bound: their number, the best one with noise, its token
    masses,  # fp32 [N, S], sum of exp(x - highest) of the keys above the bound
    V,
    share,  # N / R
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    n, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(checked + n) != DONE:
        seed, choice, position = load_keys(n, share, seeds, choices, positions)
        count, mass, best, token = look_above(
            logits + n * V, chunk * CHUNK, V, tl.load(temperatures + n // share), tl.load(bounds + n),
            tl.load(highest + n), seed, choice, position, CHUNK,
        )  # fmt: skip
        to, stride = n * tl.num_programs(1) + chunk, tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
        tl.store(found + to, count)
        tl.store(found + stride + to, best)
        tl.store(found + 2 * stride + to, token)
        tl.store(masses + to, mass)


@triton.jit(do_not_specialize=["share"])
def last_kernel(
    logits,  # [N, V]
    temperatures,  # fp32 [R]
    top_k,  # int32 [R], 0: off
    top_p,  # fp32 [R]
    min_p,  # fp32 [R]
    seeds,  # int64 [R]
    choices,  # int64 [R]
    positions,  # int64 [N]
    tops,  # fp32 [N, S]
    sums,  # fp32 [N, S]
    highest,  # fp32 [N]
    checked,  # int32 [N]
    found,  # int32 [3, N, S]
    masses,  # fp32 [N, S]
    tokens,  # int64 [N]
    V,
    share,  # N / R
    splits,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    n = tl.program_id(0).to(tl.int64)
    token = tl.load(checked + n)
    if token != DONE:
        temperature, k, p, smallest, whole = load_filters(n // share, temperatures, top_k, top_p, min_p, V)
        seed, choice, position = load_keys(n, share, seeds, choices, positions)
        s, stride = tl.arange(0, SPLITS), tl.num_programs(0).to(tl.int64) * splits
        own, here = n * splits + s, s < splits
        count = tl.sum(tl.load(found + own, mask=here, other=0), 0)
        best = tl.load(found + stride + own, mask=here, other=NOTHING)
        above = tl.load(found + 2 * stride + own, mask=here, other=NO_TOKEN)
        above = tl.min(tl.where(best == tl.max(best, 0), above, NO_TOKEN), 0)  # the best token above the bound
        if (not whole) | ((k == 0) & (p >= 1.0)):
            token = above  # nothing but the bound had to be kept to
        else:
            row, top = logits + n * V, tl.load(highest + n)
            mass = tl.sum(tl.load(masses + own, mask=here, other=0.0), 0)
            enough = tl.full([], float("inf"), tl.float32)
            if p < 1.0:
                tile = tl.load(tops + own, mask=here, other=float("-inf"))
                enough = p * tl.sum(tl.load(sums + own, mask=here, other=0.0) * tl.exp(tile - top), 0)
                if k > 0:
                    enough = p * mass_of_best(row, V, temperature, k, top, CHUNK)
            most = tl.where(k > 0, k, V)
            while (token == REJECTED) | (count >= most) | (mass >= enough):
                token = above
                bound = ordered(tl.div_rn(tl.load(row + token).to(tl.float32), temperature))
                count, mass, above = look_above_in_row(
                    row, V, temperature, bound, top, seed, choice, position, CHUNK
                )  # fmt: skip
        tl.store(tokens + n, token.to(tl.int64))


def sample_tokens(
    logits_NV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    choice_R: Tensor,
    position_N: Tensor,
) -> Tensor:
    """The token of every row, int64 [N], in the N positions; each of the R settings is for N / R consecutive rows.

    fp32 temperature (0: greedy), int32 top_k (0: off), fp32 top_p and min_p, int64 seed (64 bits), choice and position.
    """
    rows, vocab = logits_NV.shape
    require_tensor("logits", logits_NV, (None, None), FLOATS)
    settings = {"temperature": temperature_R, "top_p": top_p_R, "min_p": min_p_R, "seed": seed_R, "choice": choice_R}
    share = shared_by(rows, top_k=top_k_R, **settings)
    require_tensor("position", position_N, (rows,), (torch.int64,))

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=logits_NV.device)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=logits_NV.device)

    chunk = min(CHUNK, max(GROUP.value, power_of_two(vocab)))
    splits = cdiv(vocab, chunk)
    groups, padded = splits * chunk // GROUP.value, power_of_two(splits)
    filters, keys = (temperature_R, top_k_R, top_p_R, min_p_R), (seed_R, choice_R, position_N)
    maxima, tops, sums, tokens_N = (
        integers(rows, groups),
        floats(rows, splits),
        floats(rows, splits),
        torch.empty_like(position_N),
    )
    highest, bounds, checked = floats(rows), integers(rows), integers(rows)
    found, masses = integers(3, rows, splits), floats(rows, splits)
    first_kernel[(rows, splits)](
        logits_NV, *filters, *keys, maxima, tops, sums, vocab, share, CHUNK=chunk, PDL=PDL,
        **launch_options(FIRST_WARPS, 1),
    )  # fmt: skip
    decide_kernel[(rows,)](
        logits_NV, *filters, *keys, maxima, tops, integers(rows, 2 * MANY.value), highest, bounds, checked, tokens_N,
        vocab, share, groups, splits, SPLITS=padded, WIDTH=max(MANY.value, power_of_two(groups)), PDL=PDL,
        **launch_options(DECIDE_WARPS, 1),
    )  # fmt: skip
    check_kernel[(rows, splits)](
        logits_NV, temperature_R, *keys, highest, bounds, checked, found, masses, vocab, share, CHUNK=chunk, PDL=PDL,
        **launch_options(FIRST_WARPS, 1),
    )  # fmt: skip
    last_kernel[(rows,)](
        logits_NV, *filters, *keys, tops, sums, highest, checked, found, masses, tokens_N, vocab, share, splits,
        SPLITS=padded, CHUNK=chunk, PDL=PDL, **launch_options(LAST_WARPS, 1),
    )  # fmt: skip
    return tokens_N
