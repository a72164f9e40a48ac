"""Where top-k, top-p and min-p cut a row of scaled logits: among its candidates, and, where these cannot tell, in all
of it. Keys are the floats' bits in their order (top_rows.py).
"""

import triton
import triton.language as tl

from target_model.kernels.top_rows import NOTHING, largest_key, ordered, unordered


@triton.jit
def has_filters(k, p, smallest, V):
    return ((k > 0) & (k < V)) | (p < 1.0) | (smallest > 0.0)


@triton.jit
def key_of_mass(key, weight, share, low, high):
    """The largest number for which the keys that reach it weigh at least `share`; `low` is one, `high` is not."""
    while high > low + 1:
        middle = (low & high) + ((low ^ high) >> 1)
        if tl.sum(tl.where(key >= middle, weight, 0.0), 0) >= share:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def find_threshold(key, complete, row_mass, k, p, smallest, GROUPS: tl.constexpr):
    """(key of the threshold, whether it is right) from candidates: all entries of the row whose key is `complete` or
    more, and others; `row_mass` is sum of exp(x - max) over the row; k = 0 is off.
    """
    highest = tl.max(key, 0)
    top = unordered(highest)
    weight = tl.where(key > NOTHING, tl.exp(unordered(key) - top), 0.0)
    low, mass, known = tl.full([], NOTHING, tl.int32), row_mass, k <= 0
    if k > 0:
        low = largest_key(key, k, GROUPS)
        above = key > low
        border = (k - tl.sum(above.to(tl.int32), 0)).to(tl.float32) * tl.exp(unordered(low) - top)
        mass = tl.sum(tl.where(above, weight, 0.0), 0) + border
        known = low >= complete
    if p < 1.0:
        floor = tl.maximum(low, complete)
        if tl.sum(tl.where(key >= floor, weight, 0.0), 0) >= mass * p:
            low = tl.maximum(low, key_of_mass(key, weight, mass * p, floor, highest + 1))
    if smallest > 0.0:
        low = tl.maximum(low, ordered(top + tl.log(smallest)))
    return low, known & (low >= complete)


@triton.jit
def scaled_tile(row, first, V, temperature, BLOCK: tl.constexpr):
    v = first + tl.arange(0, BLOCK)
    return tl.div_rn(tl.load(row + v, mask=v < V, other=float("-inf")).to(tl.float32), temperature)


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
def key_in_row(row, V, temperature, low, high, k, share, top, BLOCK: tl.constexpr):
    """The largest number that at least k of the row's keys reach and whose keys weigh at least `share`."""
    while high > low + 1:
        middle = (low & high) + ((low ^ high) >> 1)
        count, mass = weigh_row(row, V, temperature, middle, top, BLOCK)
        if (count >= k) & (mass >= share):
            low = middle
        else:
            high = middle
    return low


@triton.jit
def find_in_row(row, V, temperature, highest, row_mass, k, p, smallest, BLOCK: tl.constexpr):
    """The threshold, fp32, from a search in the whole row, which reads it some 30 times a filter."""
    top = unordered(highest)
    least = ordered(tl.full([], float("-inf"), tl.float32))
    low, mass = least, row_mass
    if k > 0:
        low = key_in_row(row, V, temperature, low, highest + 1, k, 0.0, top, BLOCK)
        count, mass = weigh_row(row, V, temperature, low + 1, top, BLOCK)
        mass += (k - count).to(tl.float32) * tl.exp(unordered(low) - top)
    if p < 1.0:
        low = key_in_row(row, V, temperature, low, highest + 1, 0, mass * p, top, BLOCK)
    if smallest > 0.0:
        low = tl.maximum(low, ordered(top + tl.log(smallest)))
    return unordered(low)
