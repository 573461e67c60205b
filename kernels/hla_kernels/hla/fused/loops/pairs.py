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
def load_pair(ptr, i, stride, live, W: tl.constexpr):
    """Rows i of two heads, zero where not live."""
    c = tl.arange(0, W.D1)[None, :]
    e = tl.arange(0, 2 * (W.D - W.D1))[None, :]
    at = ptr + i[:, None] * stride
    keep = live[:, None]
    a = tl.load(at + c, mask=keep, other=0.0)
    t = tl.load(at + W.D1 + e, mask=keep, other=0.0)
    return a, t, tl.load(at + (2 * W.D - W.D1) + c, mask=keep, other=0.0)


@triton.jit
def load_ends(ptr, i, stride, live, W: tl.constexpr):
    """Load the middle block of a tile in 64 columns: wgmma needs 64 rows of it, and mixing mma.sync with wgmma makes
    the assembler wait for each product."""
    c = tl.arange(0, 64)[None, :]
    keep = live[:, None] & (c < 2 * (W.D - W.D1))
    return tl.load(ptr + i[:, None] * stride + W.D1 + c, mask=keep, other=0.0)


@triton.jit
def store_pair(ptr, i, stride, live, x, W: tl.constexpr):
    """Inverse of load_pair, in the element type of ptr."""
    c = tl.arange(0, W.D1)[None, :]
    e = tl.arange(0, 2 * (W.D - W.D1))[None, :]
    at = ptr + i[:, None] * stride
    keep = live[:, None]
    dtype: tl.constexpr = ptr.dtype.element_ty
    tl.store(at + c, x[0].to(dtype), mask=keep)
    tl.store(at + W.D1 + e, x[1].to(dtype), mask=keep)
    tl.store(at + (2 * W.D - W.D1) + c, x[2].to(dtype), mask=keep)


@triton.jit
def ends(SECOND: tl.constexpr, W: tl.constexpr):
    """Return for the first or the second head the channels of its block of D1 and of the block of 2 E, and which of the
    latter belong to it."""
    E: tl.constexpr = W.D - W.D1
    e = tl.arange(0, 2 * E)
    if SECOND:
        out = (E + tl.arange(0, W.D1), e - E, e >= E)
    else:
        out = (tl.arange(0, W.D1), W.D1 + e, e < E)
    return out


@triton.jit
def together(a, b):
    """Two matrices of four blocks as seven."""
    return a[0], a[1], a[2], b[0], b[1], b[2], a[3] + b[3]


@triton.jit
def alone(m, scale, SECOND: tl.constexpr, W: tl.constexpr):
    """The first or the second of two matrices of sums times scale, as four blocks: what is not its own is zero."""
    _, _, own = ends(SECOND, W)
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
def rows_times(x, m):
    """Return each head's tokens times its matrix, in float32."""
    a = tl.dot(x[1], m[2], tl.dot(x[0], m[0]))
    t = tl.dot(x[1], m[6], tl.dot(x[2], m[4], tl.dot(x[0], m[1])))
    return a, t, tl.dot(x[1], m[5], tl.dot(x[2], m[3]))


@triton.jit
def no_sums(E2: tl.constexpr, W: tl.constexpr):
    """Zeros for `add_outer`."""
    a11 = tl.full([W.D1, W.D1], 0.0, tl.float32)
    a12 = tl.full([W.D1, E2], 0.0, tl.float32)
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
def end_outer(m):
    """Return the matrices that `add_outer` summed."""
    m22 = tl.sum(tl.reshape(m[6], [64 // m[6].shape[1], m[6].shape[1], m[6].shape[1]]), 0)
    return m[0], m[1], tl.trans(m[2]), m[3], m[4], tl.trans(m[5]), m22


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
def pair_sums(k, v, kn, vn, lo, hi, W: tl.constexpr, BN: tl.constexpr):
    """Return Sum k v' of two heads over tokens lo..hi, before `end_outer`."""
    m = no_sums(2 * (W.D - W.D1), W)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    for start in range(lo, hi[0], BN):
        j = anew(i, start)
        live = alive(start + j, hi)
        tv = load_pair(v + (zero + start) * vn, j, vn, live, W)
        tk = load_pair(k + (zero + start) * kn, j, kn, live, W)
        m = add_outer(m, tk, tv, load_ends(k + (zero + start) * kn, j, kn, live, W))
    return m


@triton.jit
def pair_product(x, w, o, xn, on, lo, hi, W: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr = None):
    """Write o = x w of two heads for tokens lo..hi. Last tile first: it is the one still in L2. STAGES: stages of the
    loop, if different from the kernel's."""
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    tiles = tl.cdiv(hi[0] - lo, BN)
    for t in tl.range(tiles, num_stages=STAGES):
        start = lo + (tiles - 1 - t) * BN
        live = alive(start + i, hi)
        y = rows_times(load_pair(x + (zero + start) * xn, i, xn, live, W), w)
        store_pair(o + (zero + start) * on, i, on, live, y, W)
