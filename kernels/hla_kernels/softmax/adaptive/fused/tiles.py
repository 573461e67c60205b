"""Scores and products of the passes.

Scores are [queries, keys], so that a query's largest score and sum stay within a warp. In the passes over query tiles,
weights are the first operand (`mixed`) and stay in registers, which takes up to 12 % less time. Compilers may be wrong
about such products, so the tests of compiled kernels examine their machine code. In all other products the first
operand is loaded rows, and computed weights are the second one, transposed; in float32 also in passes over query tiles.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # instead of minus infinity, whose difference to itself is NaN
UNITS = tl.constexpr(2**15)  # query tiles are numbered below it; in a list, higher bits say which key tiles they read
FREE = ["qs", "xs", "ys", "ks", "vs", "os", "gs", "dqs", "dks", "dvs", "sizes", "at"]
FREE += ["heads", "factor", "scale", "groups", "U"]  # U: if constant 1, Triton cannot pipeline `adaptive_for_tiles`


@triton.jit
def load(ptr, row, stride, inside, D: tl.constexpr, DP: tl.constexpr):
    """Load rows of D channels as [., DP], with zeros outside."""
    d = tl.arange(0, DP)
    at = ptr + row.to(tl.int64)[:, None] * stride + d[None, :]
    return tl.load(at, inside[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store(ptr, row, stride, inside, x, D: tl.constexpr, DP: tl.constexpr):
    """Store rows of D channels from [., DP], the inverse of `load`."""
    d = tl.arange(0, DP)
    at = ptr + row.to(tl.int64)[:, None] * stride + d[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), inside[:, None] & (d < D)[None, :])


@triton.jit
def tail(x):
    """Return the last 13 bits of float32, which tensor cores cut off in TF32."""
    return x - (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def in_tf32(x, x_tail, y):
    """Return x y of float32, from three products in TF32. Callers add it to sums outside of tensor cores, which cut off
    bits of sums, too."""
    found = tl.dot(x, tail(y), tl.dot(x_tail, y, input_precision="tf32"), input_precision="tf32")
    return tl.dot(x, y, found, input_precision="tf32")


@triton.jit
def products(x, y, acc=None):
    """Return x_i.y_j, [I, J], plus acc."""
    if x.dtype == tl.float32:
        found = in_tf32(x, tail(x), tl.trans(y))
        return found if acc is None else acc + found
    return tl.dot(x, tl.trans(y), acc)


@triton.jit
def head_of(ptr, strides, b, h):
    """Return the pointer to token 0 of a head; strides: of batch, token and head. Token strides are multiples of 8
    (`operator`), which must be declared on a sum or product to get 16-byte loads."""
    return ptr + tl.multiple_of(b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[2], 8)


@triton.jit
def places(row, stride, DP: tl.constexpr):
    """Return the offsets of the channels of rows, [., DP]. Both axes need the hint: without the second one Triton loads
    2 bytes at a time."""
    return tl.multiple_of(row.to(tl.int64)[:, None] * stride, [8, 8]) + tl.arange(0, DP)[None, :]


@triton.jit
def get(ptr, row, strides, inside, D: tl.constexpr, DP: tl.constexpr):
    """Load rows of tokens as [., DP], with zeros outside."""
    return tl.load(ptr + places(row, strides[1], DP), inside[:, None] & (tl.arange(0, DP) < D)[None, :], other=0.0)


@triton.jit
def put(ptr, row, strides, inside, x, D: tl.constexpr, DP: tl.constexpr):
    """Store rows of tokens from [., DP], the inverse of `get`."""
    at = ptr + places(row, strides[1], DP)
    tl.store(at, x.to(ptr.dtype.element_ty), inside[:, None] & (tl.arange(0, DP) < D)[None, :])


@triton.jit
def added(acc, x, w):
    """Return acc + x'w for rows of tokens x and computed w."""
    if x.dtype == tl.float32:
        return acc + in_tf32(tl.trans(x), tl.trans(tail(x)), w)
    return tl.dot(tl.trans(x), w.to(x.dtype), acc)


@triton.jit
def weighted(acc, x, w):
    """Return acc + x'w' for rows of tokens x and computed w [queries, rows]."""
    return added(acc, x, tl.trans(w.to(x.dtype)))


@triton.jit
def zero_sums(x, rows: tl.constexpr, DP: tl.constexpr):
    """Return zeros for the sums of some rows, [rows, DP], or [DP, rows] if the tokens x are float32."""
    return tl.zeros([DP, rows] if x.dtype == tl.float32 else [rows, DP], tl.float32)


@triton.jit
def by_row(sums, x):
    """Return sums, in the layout of `zero_sums`, as [rows, DP]."""
    return tl.trans(sums) if x.dtype == tl.float32 else sums


@triton.jit
def per_row(f, x):
    """Return one number per row, in the layout of `zero_sums`."""
    return f[None, :] if x.dtype == tl.float32 else f[:, None]


@triton.jit
def mixed(sums, w, x):
    """Return sums + w x, in the layout of `zero_sums`, for computed w [rows, rows of x] and tokens x."""
    if x.dtype == tl.float32:
        return weighted(sums, x, w)
    else:  # Triton compiles what follows a return
        return tl.dot(w.to(x.dtype), x, sums)


@triton.jit
def projected(x, y):
    """Return x_i.y_j of tokens x, in the layout of `zero_sums`."""
    return products(y, x) if x.dtype == tl.float32 else products(x, y)


@triton.jit
def tile_sums(x, W: tl.constexpr):
    """Return the sums of W consecutive rows of x."""
    return tl.sum(tl.reshape(x, [x.shape[0] // W, W, x.shape[1]]), 1)


@triton.jit
def far_tiles(start, MEAN, LOGN, T, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr):
    """Load BM key tiles: (indices, validity, mean, log2 of the size)."""
    m = start + tl.arange(0, BM)
    there = m < T
    return m, there, load(MEAN, m, D, there, D, DP), tl.load(LOGN + m, there, other=-float("inf"))


@triton.jit
def exact_tiles(start, n_slots, LIST, listed, KT: tl.constexpr, BJ: tl.constexpr):
    """Load the key tiles of BJ of n_slots slots: those in LIST, or if not `listed` all in order."""
    e = start + tl.arange(0, BJ)
    return tl.where(listed, tl.load(LIST + e // KT, listed & (e < n_slots), other=0), e // KT)


@triton.jit
def exact_rows(start, n_slots, TOKENS, tile, KT: tl.constexpr, BJ: tl.constexpr):
    """Load the tokens of BJ slots of given key tiles, -1 behind n_slots. Loops load them a step ahead, and their tiles
    two: Triton does not load keys ahead whose addresses are loaded in the same step."""
    e = start + tl.arange(0, BJ)
    return tl.load(TOKENS + tile * KT + e % KT, e < n_slots, other=-1)


@triton.jit
def is_chosen(CHOSEN, start, T, BM: tl.constexpr):
    """Load whether each of BM key tiles is exact; a step ahead, since Triton does not load bytes ahead."""
    m = start + tl.arange(0, BM)
    return tl.load(CHOSEN + m, m < T, other=1)


@triton.jit
def query_rows(TOKENS, u, exists, BQ: tl.constexpr):
    """Return the rows of a query tile, -1 for none."""
    return tl.load(TOKENS + u * BQ + tl.arange(0, BQ), (tl.arange(0, BQ) < BQ) & exists, other=-1)
