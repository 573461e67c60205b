"""The passes over the tokens as they are, for two neighbouring heads at once.

A row of 72 channels ends in half a sector of 32 bytes, which memory is paid for as a whole; two of them end where a
sector does. A tile of a pair is (the first head's D1 channels, E channels of each head, the second head's other D1),
D = D1 + E: three blocks of whole sectors. So the second head has its first E channels last, in rows and columns of its
matrices too. Two matrices are seven blocks (a11, a12, a21, b11, b12, b21, m22), of which m22 [2 E, 2 E] is that of both
heads on its diagonal and zero beside it.
"""

import triton
import triton.language as tl

from .extent import alive, span, upto


@triton.jit
def load_pair(ptr, i, stride, live, D: tl.constexpr, D1: tl.constexpr):
    """Rows i of two heads, zero where not live."""
    c = tl.arange(0, D1)[None, :]
    e = tl.arange(0, 2 * (D - D1))[None, :]
    at = ptr + i[:, None] * stride
    keep = live[:, None]
    a = tl.load(at + c, mask=keep, other=0.0)
    t = tl.load(at + D1 + e, mask=keep, other=0.0)
    return a, t, tl.load(at + (2 * D - D1) + c, mask=keep, other=0.0)


@triton.jit
def load_ends(ptr, i, stride, live, D: tl.constexpr, D1: tl.constexpr):
    """The middle block of a tile in 64 columns: a product wants 64 rows of it, and mma.sync beside wgmma makes the
    assembler wait for each."""
    c = tl.arange(0, 64)[None, :]
    keep = live[:, None] & (c < 2 * (D - D1))
    return tl.load(ptr + i[:, None] * stride + D1 + c, mask=keep, other=0.0)


@triton.jit
def store_pair(ptr, i, stride, live, x, D: tl.constexpr, D1: tl.constexpr):
    """Inverse of load_pair, in the element type of ptr."""
    c = tl.arange(0, D1)[None, :]
    e = tl.arange(0, 2 * (D - D1))[None, :]
    at = ptr + i[:, None] * stride
    keep = live[:, None]
    dtype: tl.constexpr = ptr.dtype.element_ty
    tl.store(at + c, x[0].to(dtype), mask=keep)
    tl.store(at + D1 + e, x[1].to(dtype), mask=keep)
    tl.store(at + (2 * D - D1) + c, x[2].to(dtype), mask=keep)


@triton.jit
def ends(SECOND: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """Of the first or the second head: the channels of its block of D1 and of that of 2 E, and which of the latter are
    its own."""
    E: tl.constexpr = D - D1
    e = tl.arange(0, 2 * E)
    if SECOND:
        out = (E + tl.arange(0, D1), e - E, e >= E)
    else:
        out = (tl.arange(0, D1), D1 + e, e < E)
    return out


@triton.jit
def load_one(ptr, SECOND: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, SA: tl.constexpr, SB: tl.constexpr):
    """A [D, D] matrix of the first or the second head with element strides (SA, SB), as four blocks."""
    i, e, own = ends(SECOND, D, D1)
    m11 = tl.load(ptr + i[:, None] * SA + i[None, :] * SB)
    m12 = tl.load(ptr + i[:, None] * SA + e[None, :] * SB, mask=own[None, :], other=0.0)
    m21 = tl.load(ptr + e[:, None] * SA + i[None, :] * SB, mask=own[:, None], other=0.0)
    m22 = tl.load(ptr + e[:, None] * SA + e[None, :] * SB, mask=own[:, None] & own[None, :], other=0.0)
    return m11, m12, m21, m22


@triton.jit
def store_one(
    ptr, m, scale, SECOND: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, SA: tl.constexpr, SB: tl.constexpr
):
    """Inverse of load_one, times scale; what is not the head's own is left out."""
    i, e, own = ends(SECOND, D, D1)
    tl.store(ptr + i[:, None] * SA + i[None, :] * SB, m[0] * scale)
    tl.store(ptr + i[:, None] * SA + e[None, :] * SB, m[1] * scale, mask=own[None, :])
    tl.store(ptr + e[:, None] * SA + i[None, :] * SB, m[2] * scale, mask=own[:, None])
    tl.store(ptr + e[:, None] * SA + e[None, :] * SB, m[3] * scale, mask=own[:, None] & own[None, :])


@triton.jit
def load_two(ptr, step, D: tl.constexpr, D1: tl.constexpr):
    """Two [D, D] matrices, `step` elements apart."""
    return together(load_one(ptr, False, D, D1, D, 1), load_one(ptr + step, True, D, D1, D, 1))


@triton.jit
def store_two(ptr, step, m, scale, D: tl.constexpr, D1: tl.constexpr, SA: tl.constexpr, SB: tl.constexpr):
    """Two matrices times scale, with element strides (SA, SB)."""
    store_one(ptr, (m[0], m[1], m[2], m[6]), scale, False, D, D1, SA, SB)
    store_one(ptr + step, (m[3], m[4], m[5], m[6]), scale, True, D, D1, SA, SB)


@triton.jit
def together(a, b):
    """Two matrices of four blocks as seven."""
    return a[0], a[1], a[2], b[0], b[1], b[2], a[3] + b[3]


@triton.jit
def alone(m, scale, SECOND: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """The first or the second of two matrices of sums times scale, as four blocks: what is not its own is zero."""
    _, _, own = ends(SECOND, D, D1)
    if SECOND:
        a11, a12, a21 = m[3], m[4], m[5]
    else:
        a11, a12, a21 = m[0], m[1], m[2]
    a12 = tl.where(own[None, :], a12 * scale, 0.0)
    a21 = tl.where(own[:, None], a21 * scale, 0.0)
    return a11 * scale, a12, a21, tl.where(own[:, None] & own[None, :], m[6] * scale, 0.0)


@triton.jit
def turn(m):
    """Both matrices transposed."""
    return (
        tl.trans(m[0]), tl.trans(m[2]), tl.trans(m[1]), tl.trans(m[3]), tl.trans(m[5]), tl.trans(m[4]), tl.trans(m[6]),
    )  # fmt: skip


@triton.jit
def no_rows(BN: tl.constexpr, E2: tl.constexpr, D1: tl.constexpr):
    """A tile of zeros in float32."""
    a = tl.zeros([BN, D1], tl.float32)
    return a, tl.zeros([BN, E2], tl.float32), a


@triton.jit
def rows_times(acc, x, m):
    """acc + each head's tokens times its matrix."""
    a = tl.dot(x[0], m[0], acc[0])
    b = tl.dot(x[2], m[3], acc[2])
    t = tl.dot(x[0], m[1], acc[1])
    t = tl.dot(x[2], m[4], t)
    return tl.dot(x[1], m[2], a), tl.dot(x[1], m[6], t), tl.dot(x[1], m[5], b)


@triton.jit
def no_sums(E2: tl.constexpr, D1: tl.constexpr, NEEDED: tl.constexpr):
    """Zeros for `add_outer` and `add_square`, or a placeholder."""
    if NEEDED:
        a11 = tl.zeros([D1, D1], tl.float32)
        a12 = tl.zeros([D1, E2], tl.float32)
        out = (a11, a12, a12, a11, a12, a12, tl.zeros([64, E2], tl.float32))
    else:
        a = tl.zeros([1, 1], tl.float32)
        out = (a, a, a, a, a, a, a)
    return out


@triton.jit
def add_outer(m, x, y, ends):
    """m + x'y over the tokens of a tile, ends = `load_ends` of x; blocks 21 transposed until `end_outer`: 64 rows make
    them a wgmma."""
    a11 = tl.dot(tl.trans(x[0]), y[0], m[0])
    a12 = tl.dot(tl.trans(x[0]), y[1], m[1])
    a21 = tl.dot(tl.trans(y[0]), x[1], m[2])
    b11 = tl.dot(tl.trans(x[2]), y[2], m[3])
    b12 = tl.dot(tl.trans(x[2]), y[1], m[4])
    b21 = tl.dot(tl.trans(y[2]), x[1], m[5])
    return a11, a12, a21, b11, b12, b21, tl.dot(tl.trans(ends), y[1], m[6])


@triton.jit
def add_square(m, x, ends):
    """m + x'x over the tokens of a tile, without blocks 21."""
    a11 = tl.dot(tl.trans(x[0]), x[0], m[0])
    a12 = tl.dot(tl.trans(x[0]), x[1], m[1])
    b11 = tl.dot(tl.trans(x[2]), x[2], m[3])
    b12 = tl.dot(tl.trans(x[2]), x[1], m[4])
    return a11, a12, m[2], b11, b12, m[5], tl.dot(tl.trans(ends), x[1], m[6])


@triton.jit
def end_outer(m, SQUARE: tl.constexpr, NEEDED: tl.constexpr):
    """The matrices that `add_outer` or `add_square` (SQUARE) summed."""
    out = m
    if NEEDED:
        m22 = tl.sum(tl.reshape(m[6], [64 // m[6].shape[1], m[6].shape[1], m[6].shape[1]]), 0)
        a21, b21 = m[2], m[5]
        if SQUARE:
            a21, b21 = m[1], m[4]
        out = (m[0], m[1], tl.trans(a21), m[3], m[4], tl.trans(b21), m22)
    return out


@triton.jit
def place_pair(H, PARTS, N, chunk, ROLES: tl.constexpr):
    """(batch and first token, first head of the pair, its number among all, tokens lo, hi) of this program; ROLES
    neighbouring ones have the same."""
    pid = tl.program_id(0) // ROLES
    half = H // 2
    b = pid // (half * PARTS)
    h = pid % half * 2
    part = (pid // half) % PARTS
    at, n, _ = span(N, b, b * H + h, 0.0)
    lo = part * chunk
    return at, h, (b * H + h).to(tl.int64), lo, upto(lo + chunk, n)


@triton.jit
def pair_moments(q, k, v, qn, kn, vn, lo, hi, ORDER: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, BN: tl.constexpr):
    """P, (C, S) or (P, R) of two heads over tokens lo..hi (ORDER 1: P twice)."""
    E2: tl.constexpr = 2 * (D - D1)
    x = no_sums(E2, D1, True)
    y = no_sums(E2, D1, ORDER > 1)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    for start in range(lo, hi[0], BN):
        live = alive(start + i, hi)
        tk = load_pair(k + (zero + start) * kn, i, kn, live, D, D1)
        tv = load_pair(v + (zero + start) * vn, i, vn, live, D, D1)
        tq = load_pair(q + (zero + start) * qn, i, qn, live, D, D1)
        ek = load_ends(k + (zero + start) * kn, i, kn, live, D, D1)
        if ORDER == 2:
            y = add_square(y, tk, ek)
            x = add_outer(x, tq, tv, load_ends(q + (zero + start) * qn, i, qn, live, D, D1))
        else:
            x = add_outer(x, tk, tv, ek)
        if ORDER == 3:
            y = add_outer(y, tk, tq, ek)
    return end_outer(x, False, True), end_outer(y, ORDER == 2, ORDER > 1)


@triton.jit
def pair_gradient(q, g, qn, gn, lo, hi, D: tl.constexpr, D1: tl.constexpr, BN: tl.constexpr):
    """dM' of two heads over tokens lo..hi."""
    dm = no_sums(2 * (D - D1), D1, True)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    for start in range(lo, hi[0], BN):
        live = alive(start + i, hi)
        tq = load_pair(q + (zero + start) * qn, i, qn, live, D, D1)
        tg = load_pair(g + (zero + start) * gn, i, gn, live, D, D1)
        dm = add_outer(dm, tg, tq, load_ends(g + (zero + start) * gn, i, gn, live, D, D1))
    return end_outer(dm, False, True)


@triton.jit
def pair_product(q, o, m, qn, on, lo, hi, D: tl.constexpr, D1: tl.constexpr, BN: tl.constexpr):
    """Write o = q m of two heads for tokens lo..hi. Last tile first: it is the one still in L2."""
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    tiles = tl.cdiv(hi[0] - lo, BN)
    for t in range(tiles):
        start = lo + (tiles - 1 - t) * BN
        live = alive(start + i, hi)
        tq = load_pair(q + (zero + start) * qn, i, qn, live, D, D1)
        y = rows_times(no_rows(BN, 2 * (D - D1), D1), tq, m)
        store_pair(o + (zero + start) * on, i, on, live, y, D, D1)
