"""How long rows are searched without sorting them: the maxima of groups of GROUP neighbouring columns say which few
groups can hold a row's best entries.

Whatever is among the K largest entries of a row lies in one of the K groups with the largest maxima; of equal maxima
the lower groups do, when of equal entries the lower columns are wanted. Floats are compared as int32 keys in their
order; the K-th largest of many comes from a bisection on its bits.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(32)
NOTHING = tl.constexpr(-(2**31))  # key of what is not there: below that of -inf


@triton.jit
def ordered(x):
    """int32 keys in the order of the floats."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    """The floats of keys."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def group_maxima(value):
    """The largest of every GROUP values."""
    return tl.max(tl.reshape(value, [value.shape[0] // GROUP, GROUP]), 1)


@triton.jit
def sum_of_exponentials(x):
    """(maximum, sum of exp(x - maximum)); (-inf, 0) when all are -inf."""
    top = tl.max(x, 0)
    return top, tl.sum(tl.exp(x - tl.where(top > float("-inf"), top, 0.0)), 0)


@triton.jit
def count_from(key, bound):
    return tl.sum((key >= bound).to(tl.int32), 0)


@triton.jit
def largest_key(key, k, PARTS: tl.constexpr):
    """The largest number that at least k of the keys reach, which are k or more; quickest for k <= PARTS."""
    best = tl.max(tl.reshape(key, [key.shape[0] // PARTS, PARTS]), 0)
    low, high = tl.where(k <= PARTS, tl.min(best, 0), NOTHING), tl.max(best, 0) + 1
    found = count_from(key, low)
    while (found != k) & ((high >> 16) - (low >> 16) > 1):  # bf16 numbers differ in this half only, and often tie
        middle = ((low >> 16) + (high >> 16) >> 1) << 16
        count = count_from(key, middle)
        if count >= k:
            low, found = middle, count
        else:
            high = middle
    high = tl.max(tl.where(key < high, key, NOTHING), 0) + 1
    while (found != k) & (high > low + 1):
        middle = (low & high) + ((low ^ high) >> 1)
        count = count_from(key, middle)
        if count >= k:
            low, found = middle, count
        else:
            high = middle
    return low


@triton.jit
def places(key, low, K: tl.constexpr):
    """Where each key goes among the best K, which stay in their order; K: nowhere. `low = largest_key(key, K)`; of the
    keys that equal it the first ones find room.
    """
    above, equal = key > low, key == low
    before = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    equals, room = before >> 16, K - tl.sum(above.to(tl.int32), 0)
    return tl.where(above | (equal & (equals <= room)), (before & 0xFFFF) + tl.minimum(equals, room) - 1, K)


@triton.jit
def keep_best_groups(maxima, slots, groups, WIDTH: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr):
    """Writes which K groups have the largest maxima (keys), in ascending order; returns the largest key of the others.

    With fewer groups than K the rest are numbers behind the last one.
    """
    g = tl.arange(0, WIDTH)
    key = tl.load(maxima + g, mask=g < groups, other=NOTHING)
    place = places(key, largest_key(key, K, PARTS), K)
    tl.store(slots + place, g, mask=place < K)
    tl.debug_barrier()  # other threads of this program read them
    return tl.max(tl.where(place < K, NOTHING, key), 0)


@triton.jit
def columns_of_groups(slots, K: tl.constexpr, BLOCK: tl.constexpr):
    """The columns of the kept groups in ascending order, int32 [GROUP * BLOCK]; far behind the row from K groups on."""
    i = tl.arange(0, GROUP * BLOCK)
    group = tl.load(slots + i // GROUP, mask=i // GROUP < K, other=(1 << 26) - 1, cache_modifier=".cg")
    return group * GROUP + i % GROUP
