"""Tiles of tokens and blocks, their scores and weights. Scores are base-2 logarithms: weights are 2^score."""

import triton
import triton.language as tl

from ...rows import LN2, load, products
from .geometry import axes_of, block_at, in_box, is_near, is_touched


@triton.jit
def keys(
    start, K, V, ks, vs, box, place, reach, grid, per_length, blocks, outer,
    D: tl.constexpr, DP: tl.constexpr, PT: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Load BJ of the keys that a tile of queries reads one by one: (k, v, validity, block, which are near)."""
    e = start + tl.arange(0, BJ)
    row, there, at, is_outer = in_box(e, box[0], box[1], box[2], grid, outer, PT)
    k, v = load(K, row, ks[1], there, D, DP), load(V, row, vs[1], there, D, DP)
    near = is_near(place, at, reach, PT) | is_outer[None, :]
    return k, v, there, block_at(at, is_outer, per_length, blocks, PT), near


@triton.jit
def weights_of(COUNT, near, m, blocks):
    """Return (validity of a block, logarithm of its number of tokens, minus infinity if it is read key by key)."""
    there = m < blocks[0] * blocks[1] * blocks[2]
    count = tl.load(COUNT + m, there, other=-float("inf"))
    return there, tl.where(is_touched(near, axes_of(m, blocks)), -float("inf"), count)


@triton.jit
def anchored(q, A, LOW, m, there, WHOLE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Return (mean keys A of blocks m, scores of queries with them [I, M]). WHOLE: add LOW, the rounding error of A, in
    the scores.

    Rounding a mean key changes all weights of its block alike. With degree 0 the change is smaller than the rounding of
    the weights; with a factor f(r) it is r times larger.
    """
    mean = load(A, m, D, there, D, DP)
    a = products(q, mean)
    if WHOLE:
        a += products(q, load(LOW, m, D, there, D, DP))
    return mean, a


@triton.jit
def factors(s, a, near, DEGREE: tl.constexpr):
    """Return (exponent, factor f, d weight / d s and d weight / d a over exp(exponent)) for a tile of scores with keys
    and with anchors; weight = f exp(exponent)."""
    exponent = tl.where(near, s, a)
    r = (s - a) * LN2
    if DEGREE == 0:
        f = tl.full(s.shape, 1.0, tl.float32)
        by_s = tl.where(near, 1.0, 0.0)
        by_a = 1.0 - by_s
    elif DEGREE == 1:
        f = tl.where(near, 1.0, 1 + r)
        by_s = tl.full(s.shape, 1.0, tl.float32)
        by_a = tl.where(near, 0.0, r)
    else:
        f = tl.where(near, 1.0, 1 + r + r * r * 0.5)
        by_s = tl.where(near, 1.0, 1 + r)
        by_a = tl.where(near, 0.0, r * r * 0.5)
    return exponent, f, by_s, by_a
