"""What top-k, top-p and min-p leave: of the best entries of a row, and by passes over a whole row of scaled logits.
Keys are the floats' bits in their order (top_rows_groups.py).
"""

import triton
import triton.language as tl

from target_model.kernels.gumbel import noise_tile
from target_model.kernels.top_rows_groups import NOTHING, ordered, unordered

NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def first_best(value, tokens):
    """(largest key, lowest token that has it)."""
    key = ordered(value)
    best = tl.max(key, 0)
    return best, tl.min(tl.where(key == best, tokens, NO_TOKEN), 0)


@triton.jit
def passes(keys, count, k, p, smallest, K: tl.constexpr, BLOCK: tl.constexpr):
    """(keys, whether each passes all filters, the k-th largest) of the `count` keys in memory, which are all those of a
    row above its k-th largest and some that equal it; NOTHING behind them, K in all.
    """
    i = tl.arange(0, K)
    key = tl.load(keys + i, mask=i < count, other=NOTHING, cache_modifier=".cg")
    low = tl.min(tl.where(i < count, key, 0x7FFFFFFF), 0)
    top = unordered(tl.max(key, 0))
    kept = i < count
    if p < 1.0:
        before = tl.zeros([K], tl.float32)  # mass of the larger ones
        for first in range(0, K, BLOCK):
            j = first + tl.arange(0, BLOCK)
            other = tl.load(keys + j, mask=j < count, other=NOTHING, cache_modifier=".cg")
            weight = tl.where(j < count, tl.exp(unordered(other) - top), 0.0)
            before += tl.sum(tl.where(other[None, :] > key[:, None], weight[None, :], 0.0), 1)
        above = key > low
        mass = tl.sum(tl.where(above, tl.exp(unordered(key) - top), 0.0), 0)
        mass += (k - tl.sum(above.to(tl.int32), 0)).to(tl.float32) * tl.exp(unordered(low) - top)
        kept = kept & (before < mass * p)
    if smallest > 0.0:
        kept = kept & (key >= ordered(top + tl.log(smallest)))
    return key, kept, low


@triton.jit
def scaled_tile(row, first, V, temperature, BLOCK: tl.constexpr):
    v = first + tl.arange(0, BLOCK)
    return tl.div_rn(tl.load(row + v, mask=v < V, other=float("-inf")).to(tl.float32), temperature)


@triton.jit
def look_above(row, first, V, temperature, bound, top, seed, choice, position, BLOCK: tl.constexpr):
    """Of the entries of one tile whose keys are above `bound`: (number, sum of exp(x - top), largest key with noise,
    its token).
    """
    v = first + tl.arange(0, BLOCK)
    x = scaled_tile(row, first, V, temperature, BLOCK)
    above = (ordered(x) > bound) & (v < V)
    noise = noise_tile(seed, choice, position, first // 4 + tl.arange(0, BLOCK // 4))
    best, token = first_best(tl.where(above, x + noise, float("-inf")), tl.where(above, v, NO_TOKEN))
    return tl.sum(above.to(tl.int32), 0), tl.sum(tl.where(above, tl.exp(x - top), 0.0), 0), best, token


@triton.jit
def look_above_in_row(row, V, temperature, bound, top, seed, choice, position, BLOCK: tl.constexpr):
    """(number, mass, token) of `look_above` in the whole row."""
    count, mass = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float32)
    best, token = tl.full([], NOTHING, tl.int32), tl.full([], NO_TOKEN, tl.int32)
    for first in range(0, V, BLOCK):
        more, weight, key, found = look_above(
            row, first, V, temperature, bound, top, seed, choice, position, BLOCK
        )  # fmt: skip
        count, mass = count + more, mass + weight
        token = tl.where(key > best, found, token)
        best = tl.maximum(key, best)
    return count, mass, token


@triton.jit
def weigh_row(row, V, temperature, key, top, BLOCK: tl.constexpr):
    """(number, sum of exp(x - top)) of a row's entries from `key` on."""
    count, mass = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float32)
    for first in range(0, V, BLOCK):
        x = scaled_tile(row, first, V, temperature, BLOCK)
        reached = (ordered(x) >= key) & (first + tl.arange(0, BLOCK) < V)
        count += tl.sum(reached.to(tl.int32), 0)
        mass += tl.sum(tl.where(reached, tl.exp(x - top), 0.0), 0)
    return count, mass


@triton.jit
def mass_of_best(row, V, temperature, k, top, BLOCK: tl.constexpr):
    """Sum of exp(x - top) over the k largest entries of a row, which is read some 30 times."""
    low, high = ordered(tl.full([], float("-inf"), tl.float32)), ordered(top) + 1
    while high > low + 1:
        middle = (low & high) + ((low ^ high) >> 1)
        count, mass = weigh_row(row, V, temperature, middle, top, BLOCK)
        if count >= k:
            low = middle
        else:
            high = middle
    count, mass = weigh_row(row, V, temperature, low + 1, top, BLOCK)
    return mass + (k - count).to(tl.float32) * tl.exp(unordered(low) - top)
