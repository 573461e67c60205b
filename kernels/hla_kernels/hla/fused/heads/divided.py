"""First-order ratio of features, two neighbouring heads per program (`loops.pairs`).

Products between channels of two heads are not needed: in the middle block, ones replace the channels of the other head,
which gives the sums that a ratio needs. The forward saves the same tensors as `heads.head_forward`. In the backward,
`loops.first` runs the pass over queries and stores weights and rows for the pass over keys here.
"""

import triton
import triton.language as tl

from ..loops import longest, means
from ..loops.extent import alive, anew
from ..loops.pairs import ends, load_pair, no_sums, place_pair, turn
from ..loops.ratio import column_of
from ..loops.vectors import beside, once, ones_tile, reciprocal
from ..maps import elu, is_shifted
from ..tiles import axpy2, cast4, rank1, scale4, vecmat, zeros2
from . import of_head
from .duo import natural_pair, put_natural

NO_SPECIALIZE = ["qs", "ks", "vs", "os", "dks", "dvs", "N", "H", "PARTS", "chunk", "scale", "eps"]


@triton.jit
def feature(x, FMAP: tl.constexpr):
    """Features (elu + 1 less 1) of a block in float32."""
    x = x.to(tl.float32)
    if FMAP == 1:
        x = tl.maximum(x, 0.0)
    else:
        x = elu(x)
    return x


@triton.jit
def pair_features(x, FMAP: tl.constexpr):
    """`feature` of each block of a tile of two heads."""
    return feature(x[0], FMAP), feature(x[1], FMAP), feature(x[2], FMAP)


@triton.jit
def cast_pair(x, dtype: tl.constexpr):
    """Return a tile of two heads in another dtype."""
    return x[0].to(dtype), x[1].to(dtype), x[2].to(dtype)


@triton.jit
def computed(x, dtype: tl.constexpr):
    """Return a tile of two heads in a dtype, computed once (`loops.vectors.once`)."""
    return once(x[0].to(dtype)), once(x[1].to(dtype)), once(x[2].to(dtype))


@triton.jit
def slope(f, g, FMAP: tl.constexpr):
    """Return d loss / d x of a block from its features f in float32 and g = d loss / d phi(x)."""
    if FMAP == 1:
        g = tl.where(f > 0, g, 0.0)
    else:
        g = g + g * tl.minimum(f, 0.0)
    return g


@triton.jit
def load_ends(ptr, i, stride, live, D: tl.constexpr, D1: tl.constexpr):
    """`loops.pairs.load_ends` with ones beyond."""
    c = tl.arange(0, 64)[None, :]
    keep = live[:, None] & (c < 2 * (D - D1))
    return tl.load(ptr + i[:, None] * stride + D1 + c, mask=keep, other=1.0)


@triton.jit
def with_ones(t, D: tl.constexpr, D1: tl.constexpr):
    """The middle block of a tile for products with the first and with the second head: ones where it is not theirs."""
    _, _, first = ends(False, D, D1)
    return tl.where(first[None, :], t, 1.0).to(t.dtype), tl.where(first[None, :], 1.0, t).to(t.dtype)


@triton.jit
def add_features(m, x, f, tails, D: tl.constexpr, D1: tl.constexpr):
    """Return m + x'f over the tokens of a tile, f computed in the loop; tails = `load_ends` of x."""
    fa, fb = with_ones(f[1], D, D1)
    xa, xb = with_ones(x[1], D, D1)
    a11 = tl.dot(tl.trans(x[0]), f[0], m[0])
    a12 = tl.dot(tl.trans(x[0]), fa, m[1])
    b11 = tl.dot(tl.trans(x[2]), f[2], m[3])
    b12 = tl.dot(tl.trans(x[2]), fb, m[4])
    m22 = tl.dot(tl.trans(tails), f[1], m[6])
    # products by themselves: one that is carried into the next turn makes the assembler wait for every one of this turn
    a21 = m[2] + tl.dot(tl.trans(f[0]), xa, max_num_imprecise_acc=16)
    b21 = m[5] + tl.dot(tl.trans(f[2]), xb, max_num_imprecise_acc=16)
    return a11, a12, a21, b11, b12, b21, m22


@triton.jit
def row_block(m, B: tl.constexpr):
    """Rows of a matrix of 64 from B times as many as it has columns."""
    E2: tl.constexpr = m.shape[1]
    g = tl.arange(0, 64 // E2)[:, None, None]
    return tl.sum(tl.where(g == B, tl.reshape(m, [64 // E2, E2, E2]), 0.0), 0)


@triton.jit
def head_moment(m, SECOND: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """Sum f x' of one head, from what `add_features` summed."""
    _, _, own = ends(SECOND, D, D1)
    if SECOND:
        m11, m12, m21 = m[3], m[4], m[5]
    else:
        m11, m12, m21 = m[0], m[1], m[2]
    m12 = tl.where(own[None, :], m12, 0.0)
    m21 = tl.where(own[None, :], m21, 0.0)
    m22 = tl.where(own[:, None] & own[None, :], row_block(m[6], 0), 0.0)
    return tl.trans(m11), m21, tl.trans(m12), tl.trans(m22)


@triton.jit
def head_sum(m, s, SECOND: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """Return Sum x of one head, from the sums of `add_features` and the sum s of the middle block."""
    _, _, own = ends(SECOND, D, D1)
    OTHER: tl.constexpr = 0 if SECOND else 2 * (D - D1) - 1  # a column that is not its own
    return column_of(m[4] if SECOND else m[1], OTHER), tl.where(own, s, 0.0)


@triton.jit
def feature_sum(m, SECOND: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """Return Sum f of one head, from the sums of `add_features` with ones."""
    _, _, own = ends(SECOND, D, D1)
    OTHER: tl.constexpr = 0 if SECOND else 2 * (D - D1) - 1
    i = tl.arange(0, 2 * (D - D1))
    tail = tl.sum(tl.where((i == 0)[:, None], row_block(m[6], 1), 0.0), 0)
    return column_of(m[5] if SECOND else m[2], OTHER), tl.where(own, tail, 0.0)


@triton.jit
def own_ones(SECOND: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """Return the vector of ones of one head."""
    _, _, own = ends(SECOND, D, D1)
    return tl.full([D1], 1.0, tl.float32), tl.where(own, 1.0, 0.0)


@triton.jit
def put_vector(to, x, SECOND: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """Write a vector of one head in the order of its channels."""
    c, e, own = ends(SECOND, D, D1)
    tl.store(to + c, x[0])
    tl.store(to + e, x[1], mask=own)


@triton.jit
def get_vector(at, SECOND: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """Inverse of `put_vector`."""
    c, e, own = ends(SECOND, D, D1)
    return tl.load(at + c), tl.load(at + e, mask=own, other=0.0)


@triton.jit
def column_at(x, dtype: tl.constexpr, C: tl.constexpr):
    """x [K] as columns C (its rounding) and C + 1 (what that left) of a matrix [K, 16]."""
    high = x.to(dtype)
    low = (x - high.to(tl.float32)).to(dtype)
    c = tl.arange(0, 16)[None, :] - C
    return tl.where(c == 0, high[:, None], tl.where(c == 1, low[:, None], tl.zeros([x.shape[0], 16], dtype)))


@triton.jit
def pair_columns(a, b, dtype: tl.constexpr):
    """Vectors of two heads for `pair_vector`."""
    return column_at(a[0], dtype, 0), column_at(a[1], dtype, 0) + column_at(b[1], dtype, 2), column_at(b[0], dtype, 2)


@triton.jit
def pair_vector(x, c):
    """Return the product of each token of two heads with its head's vector, [BN] twice in float32."""
    y = tl.dot(x[1], c[1], tl.dot(x[2], c[2], tl.dot(x[0], c[0])))
    i = tl.arange(0, 16)[None, :]
    return tl.sum(tl.where(i < 2, y, 0.0), 1), tl.sum(tl.where(i >= 2, y, 0.0), 1)


@triton.jit
def pair_rows(a, b, dtype: tl.constexpr):
    """Vectors of two heads, which a tile of ones times them adds to every token: so they hold no registers."""
    t = tl.trans(column_at(a[1] + b[1], dtype, 0))
    return tl.trans(column_at(a[0], dtype, 0)), t, tl.trans(column_at(b[0], dtype, 0))


@triton.jit
def beside_each(a, b, D: tl.constexpr, D1: tl.constexpr):
    """Expand numbers a, b [BN] of the tokens of two heads for the three blocks of their tile."""
    _, _, first = ends(False, D, D1)
    return a[:, None], tl.where(first[None, :], a[:, None], b[:, None]), b[:, None]


@triton.jit
def rows_block(acc, x, m, I: tl.constexpr):
    """Return acc + a block of columns of each head's tokens times its matrix."""
    if I == 0:
        acc = tl.dot(x[1], m[2], tl.dot(x[0], m[0], acc))
    elif I == 1:
        acc = tl.dot(x[1], m[6], tl.dot(x[2], m[4], tl.dot(x[0], m[1], acc)))
    else:
        acc = tl.dot(x[1], m[5], tl.dot(x[2], m[3], acc))
    return acc


@triton.jit
def put_block(ptr, i, stride, live, y, I: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """Write a block of a tile of two heads."""
    C0: tl.constexpr = 0 if I == 0 else D1 if I == 1 else 2 * D - D1
    c = C0 + tl.arange(0, 2 * (D - D1) if I == 1 else D1)[None, :]
    tl.store(ptr + i[:, None] * stride + c, y.to(ptr.dtype.element_ty), mask=live[:, None])


@triton.jit
def head_operator(
    m, st, scale, n, eps, dtype: tl.constexpr, SECOND: tl.constexpr, FMAP: tl.constexpr, D: tl.constexpr,
    D1: tl.constexpr,
):  # fmt: skip
    """Return (M in a dtype, m1, row, e) of one head, as in `algebra.affine` and `ratio.ratio_base`; the anchor belongs
    to constant features 1, for which 1'M is zero."""
    E2: tl.constexpr = 2 * (D - D1)
    p = head_moment(m, SECOND, D, D1)
    sk = feature_sum(m, SECOND, D, D1)
    sv = head_sum(m, st, SECOND, D, D1)
    z = zeros2(D1, E2)
    p = scale4(rank1(p, axpy2(z, -1.0 / n, sk, E2), sv, E2, E2), scale)
    if is_shifted(FMAP):
        sk = axpy2(sk, n, own_ones(SECOND, D, D1), E2)
    m1 = axpy2(z, scale, sk, E2)
    e = tl.sum(m1[0]) + tl.sum(m1[1])
    top = vecmat((z[0] + 1.0, z[1] + 1.0), p, E2, E2)
    a = axpy2(z, tl.where(e == 0.0, 0.0, 1.0 / e), top, E2)
    out = cast4(rank1(p, axpy2(z, -1.0, m1, E2), a, E2, E2), dtype)
    row = axpy2(a, 1.0 / n, sv, E2)
    if is_shifted(FMAP):
        eps += e
    return out, m1, row, eps


@triton.jit
def put_operator(
    matrix, state, m, st, scale, n, eps, SECOND: tl.constexpr, FMAP: tl.constexpr, OFF: tl.constexpr, D: tl.constexpr,
    D1: tl.constexpr,
):  # fmt: skip
    """Write `head_operator`."""
    dtype: tl.constexpr = matrix.dtype.element_ty
    out, m1, row, e = head_operator(m, st, scale, n, eps, dtype, SECOND, FMAP, D, D1)
    put_natural(matrix, out, 1 if SECOND else 0, D, D1)
    put_vector(state + OFF[8], m1, SECOND, D, D1)
    put_vector(state + OFF[9], row, SECOND, D, D1)
    tl.store(state + OFF[6], e)
    tl.debug_barrier()  # one head after the other: both fill the registers


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def divided_forward(
    q, k, v, o, state, matrix, qs, ks, vs, os, N, H, scale, eps, FMAP: tl.constexpr, ALIGN: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, OFF: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Compute o of two heads; M goes to matrix [B * H, D, D], m1, row and e to state [B * H, K] at OFF."""
    at, h, head, lo, hi = place_pair(H, 1, N, longest(N), 1)
    n, scale = means(N, head, scale)
    q, k, v, qn, kn, vn = of_head((q, k, v), (qs, ks, vs), at, h, ALIGN)
    dtype: tl.constexpr = q.dtype.element_ty
    E2: tl.constexpr = 2 * (D - D1)
    m = no_sums(E2, D1)
    sv = tl.zeros([BN, E2], tl.float32)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    for start in range(lo, hi[0], BN):
        live = alive(start + i, hi)
        tk = load_pair(k + (zero + start) * kn, i, kn, live, D, D1)
        tv = load_pair(v + (zero + start) * vn, i, vn, live, D, D1)
        tails = load_ends(v + (zero + start) * vn, i, vn, live, D, D1)
        m = add_features(m, tv, computed(pair_features(tk, FMAP), dtype), tails, D, D1)
        sv += tv[1].to(tl.float32)
    st = tl.sum(sv, 0)
    matrix += head * D * D
    state += head * K
    put_operator(matrix, state, m, st, scale, n, eps, False, FMAP, OFF, D, D1)
    put_operator(matrix + D * D, state + K, m, st, scale, n, eps, True, FMAP, OFF, D, D1)
    tl.debug_barrier()  # every thread reads what others wrote
    w = natural_pair(matrix, D * D, D, D1)
    cols = pair_columns(get_vector(state + OFF[8], False, D, D1), get_vector(state + K + OFF[8], True, D, D1), dtype)
    row_a, row_b = get_vector(state + OFF[9], False, D, D1), get_vector(state + K + OFF[9], True, D, D1)
    base = pair_rows((-eps * row_a[0], -eps * row_a[1]), (-eps * row_b[0], -eps * row_b[1]), dtype)
    row = (row_a[0][None, :], (row_a[1] + row_b[1])[None, :], row_b[0][None, :])
    ea, eb = tl.load(state + OFF[6]), tl.load(state + K + OFF[6])
    o, on = of_head((o,), (os,), at, h, ALIGN)
    j = tl.arange(0, BO)
    ones = ones_tile(q, BO)
    tiles = tl.cdiv(hi[0] - lo, BO)
    for t in range(tiles):
        start = lo + (tiles - 1 - t) * BO
        live = alive(start + j, hi)
        f = cast_pair(pair_features(load_pair(q + (zero + start) * qn, j, qn, live, D, D1), FMAP), dtype)
        den_a, den_b = pair_vector(f, cols)
        inverse = beside_each(reciprocal(den_a + ea, live, dtype), reciprocal(den_b + eb, live, dtype), D, D1)
        for block in tl.static_range(3):
            y = rows_block(tl.dot(ones, base[block]), f, w, block) * inverse[block] + row[block]
            put_block(o + (zero + start) * on, j, on, live, y, block, D, D1)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def divided_keys(
    k, v, dk, dv, weights, rows, ks, vs, dks, dvs, N, H, PARTS, chunk, FMAP: tl.constexpr, ALIGN: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute dk = (v W' + row) phi'(k) and dv = phi(k) W + row of one part of two heads."""
    at, h, head, lo, hi = place_pair(H, PARTS, N, chunk, 1)
    k, v, dk, dv, kn, vn, dkn, dvn = of_head((k, v, dk, dv), (ks, vs, dks, dvs), at, h, ALIGN)
    dtype: tl.constexpr = k.dtype.element_ty
    wt = natural_pair(weights + head * D * D, D * D, D, D1)
    w = turn(wt)
    rows += head * 2 * D
    row_k = pair_rows(get_vector(rows, False, D, D1), get_vector(rows + 2 * D, True, D, D1), dtype)
    row_v = pair_rows(get_vector(rows + D, False, D, D1), get_vector(rows + 3 * D, True, D, D1), dtype)
    ones = ones_tile(k, BN)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    tiles = tl.cdiv(hi[0] - lo, BN)
    for t in range(tiles):
        start = lo + (tiles - 1 - t) * BN
        live = alive(start + i, hi)
        j = anew(i, start)
        tk = load_pair(k + (zero + start) * kn, j, kn, live, D, D1)
        tv = load_pair(v + (zero + start) * vn, j, vn, live, D, D1)
        f = pair_features(tk, FMAP)
        for c in tl.static_range(3):
            r = rows_block(tl.dot(ones, row_k[c]), tv, wt, c)
            put_block(dk + (zero + start) * dkn, j, dkn, live, slope(beside(f[c], r), r, FMAP), c, D, D1)
        f = cast_pair(f, dtype)
        for c in tl.static_range(3):
            put_block(dv + (zero + start) * dvn, j, dvn, live, rows_block(tl.dot(ones, row_v[c]), f, w, c), c, D, D1)
