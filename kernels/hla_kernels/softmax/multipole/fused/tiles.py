"""Tiles of tokens and blocks, their scores and weights. Scores are base-2 logarithms: weights are 2^score."""

import triton
import triton.language as tl

from ...rows import load, products
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
def pooled(q, A, LOW, m, there, D: tl.constexpr, DP: tl.constexpr):
    """Return (mean keys A of blocks m, scores of queries with them [I, M], with LOW, the rounding error of A)."""
    mean = load(A, m, D, there, D, DP)
    a = products(q, mean)
    a += products(q, load(LOW, m, D, there, D, DP))
    return mean, a
