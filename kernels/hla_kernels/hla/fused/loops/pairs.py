"""The passes over the tokens as they are, for two neighbouring heads at once.

A row of 72 channels ends in half a sector of 32 bytes, which memory is paid for as a whole; two of them end where a
sector does. A tile of a pair is (the first head's D1 channels, E channels of each head, the second head's other D1),
D = D1 + E: three blocks of whole sectors. So the second head has its first E channels last, in rows and columns of its
matrices too. Two matrices are seven blocks (a11, a12, a21, b11, b12, b21, m22), where m22 [2 E, 2 E] is block diagonal
and holds blocks 22 of both heads.
"""

import triton
import triton.language as tl

from .extent import alive, anew, span, upto


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
    """Load the middle block of a tile in 64 columns: wgmma needs 64 rows of it, and mixing mma.sync with wgmma makes
    the assembler wait for each product."""
    c = tl.arange(0, 64)[None, :]
    keep = live[:, None] & (c < 2 * (D - D1))
    return tl.load(ptr + i[:, None] * stride + D1 + c, mask=keep, other=0.0)


@triton.jit
def store_pair(ptr, i, stride, live, x, PART: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """Inverse of load_pair, in the element type of ptr; PART 1 and 2 as in `pair_product`."""
    c = tl.arange(0, D1)[None, :]
    e = tl.arange(0, 2 * (D - D1))[None, :]
    at = ptr + i[:, None] * stride
    keep = live[:, None]
    dtype: tl.constexpr = ptr.dtype.element_ty
    if PART < 2:
        tl.store(at + c, x[0].to(dtype), mask=keep)
        tl.store(at + D1 + e, x[1].to(dtype), mask=keep)
    if PART != 1:
        tl.store(at + (2 * D - D1) + c, x[2].to(dtype), mask=keep)


@triton.jit
def ends(SECOND: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """Return for the first or the second head the channels of its block of D1 and of the block of 2 E, and which of the
    latter belong to it."""
    E: tl.constexpr = D - D1
    e = tl.arange(0, 2 * E)
    if SECOND:
        out = (E + tl.arange(0, D1), e - E, e >= E)
    else:
        out = (tl.arange(0, D1), D1 + e, e < E)
    return out


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
    """Return a tile of zeros in float32."""
    a = tl.zeros([BN, D1], tl.float32)
    return a, tl.zeros([BN, E2], tl.float32), a


@triton.jit
def rows_times(acc, x, m, PART: tl.constexpr):
    """Return acc + each head's tokens times its matrix; PART 1 and 2 as in `pair_product`."""
    a, t, b = acc
    if PART < 2:
        a = tl.dot(x[1], m[2], tl.dot(x[0], m[0], a))
        t = tl.dot(x[1], m[6], tl.dot(x[2], m[4], tl.dot(x[0], m[1], t)))
    if PART != 1:
        b = tl.dot(x[1], m[5], tl.dot(x[2], m[3], b))
    return a, t, b


@triton.jit
def no_sums(E2: tl.constexpr, D1: tl.constexpr):
    """Zeros for `add_outer` and `add_square`."""
    a11 = tl.zeros([D1, D1], tl.float32)
    a12 = tl.zeros([D1, E2], tl.float32)
    return a11, a12, a12, a11, a12, a12, tl.zeros([64, E2], tl.float32)


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
    """Return m + x'x over the tokens of a tile, without blocks 21."""
    a11 = tl.dot(tl.trans(x[0]), x[0], m[0])
    a12 = tl.dot(tl.trans(x[0]), x[1], m[1])
    b11 = tl.dot(tl.trans(x[2]), x[2], m[3])
    b12 = tl.dot(tl.trans(x[2]), x[1], m[4])
    return a11, a12, m[2], b11, b12, m[5], tl.dot(tl.trans(ends), x[1], m[6])


@triton.jit
def end_outer(m):
    """Return the matrices that `add_outer` summed."""
    m22 = tl.sum(tl.reshape(m[6], [64 // m[6].shape[1], m[6].shape[1], m[6].shape[1]]), 0)
    return m[0], m[1], tl.trans(m[2]), m[3], m[4], tl.trans(m[5]), m22


@triton.jit
def of_one(m, SECOND: tl.constexpr, SQUARE: tl.constexpr):
    """Return the blocks of the first or the second head from sums before `end_outer` (SQUARE: of `add_square`); block
    22 contains both heads."""
    if SECOND:
        out = (m[3], m[4], m[4] if SQUARE else m[5], m[6])
    else:
        out = (m[0], m[1], m[1] if SQUARE else m[2], m[6])
    return out


@triton.jit
def row_maxima(m, SECOND: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """Return the largest |number| in each of D1 rows of the first or the second head, from sums before `end_outer`;
    rows of blocks 21 and 22 are folded onto the other rows."""
    E: tl.constexpr = D - D1
    _, _, own = ends(SECOND, D, D1)
    i = tl.arange(0, D1)
    if SECOND:
        a11, a12, a21, rows = m[3], m[4], m[5], (i >= E) & (i < 2 * E)
    else:
        a11, a12, a21, rows = m[0], m[1], m[2], i < E
    x = tl.max(tl.reshape(tl.abs(a11), [D1, D1 // (2 * E), 2 * E]), 1)
    x = tl.maximum(x, tl.where(own[None, :], tl.maximum(tl.abs(a12), tl.abs(a21)), 0.0))
    return tl.max(tl.maximum(x, tl.where(own[None, :] & rows[:, None], tl.abs(m[6]), 0.0)), 1)


@triton.jit
def largest_one(m, D: tl.constexpr, D1: tl.constexpr):
    """Return the largest |number| of each head, of sums before `end_outer`."""
    return tl.split(tl.max(tl.join(row_maxima(m, False, D, D1), row_maxima(m, True, D, D1)), 0))


@triton.jit
def largest_two(x, y, D: tl.constexpr, D1: tl.constexpr):
    """`largest_one` of two, in one exchange between threads."""
    a = tl.join(row_maxima(x, False, D, D1), row_maxima(y, False, D, D1))
    b = tl.join(row_maxima(x, True, D, D1), row_maxima(y, True, D, D1))
    a, b = tl.split(tl.max(tl.join(a, b), 0))
    xa, ya = tl.split(a)
    xb, yb = tl.split(b)
    return (xa, xb), (ya, yb)


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
def pair_sums(
    q, k, v, qn, kn, vn, lo, hi, ORDER: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Sums (x, y) of two heads over tokens lo..hi before `end_outer`: of ORDER 1 k'v alone, 2 q'v and k'k, 3 k'v and
    k'q, 4 k'v and k'k, 5 k'k alone."""
    x = no_sums(2 * (D - D1), D1)
    y = x
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    for start in range(lo, hi[0], BN):
        j = anew(i, start, ORDER == 3)
        live = alive(start + j, hi)
        if ORDER < 5:
            tv = load_pair(v + (zero + start) * vn, j, vn, live, D, D1)
        tk = load_pair(k + (zero + start) * kn, j, kn, live, D, D1)
        if ORDER == 2 or ORDER == 3:
            tq = load_pair(q + (zero + start) * qn, j, qn, live, D, D1)
        ek = load_ends(k + (zero + start) * kn, j, kn, live, D, D1)
        if ORDER == 2:
            y = add_square(y, tk, ek)
            x = add_outer(x, tq, tv, load_ends(q + (zero + start) * qn, j, qn, live, D, D1))
        elif ORDER == 5:
            x = add_square(x, tk, ek)
        else:
            if ORDER == 3:
                y = add_outer(y, tk, tq, ek)
            elif ORDER == 4:
                y = add_square(y, tk, ek)
            x = add_outer(x, tk, tv, ek)
    return x, y


@triton.jit
def pair_product(
    x, w, y, u, o, xn, yn, on, lo, hi, TWO: tl.constexpr, PART: tl.constexpr, D: tl.constexpr, D1: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """Write o = x w (TWO: + y u) of two heads for tokens lo..hi. Last tile first: it is the one still in L2.

    PART 0: all of o, 1: its first two blocks, 2: its last one, for which the weights of a pair take less room. STAGES:
    stages of the loop, if different from the kernel's.
    """
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    tiles = tl.cdiv(hi[0] - lo, BN)
    for t in tl.range(tiles, num_stages=STAGES):
        start = lo + (tiles - 1 - t) * BN
        live = alive(start + i, hi)
        z = no_rows(BN, 2 * (D - D1), D1)
        z = rows_times(z, load_pair(x + (zero + start) * xn, i, xn, live, D, D1), w, PART)
        if TWO:
            z = rows_times(z, load_pair(y + (zero + start) * yn, i, yn, live, D, D1), u, PART)
        store_pair(o + (zero + start) * on, i, on, live, z, PART, D, D1)
