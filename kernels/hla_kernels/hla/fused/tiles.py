"""Tiles and block matrices of the fused kernels: one vocabulary for every head width.

A width D is cut into D1 + D2 columns, both powers of two (D2 = 0: one tile). 72 = 64 + 16 costs a third of padding to
128. A token tile is a pair (x1 [BN, D1], x2 [BN, D2]), a matrix the four blocks (m11, m12, m21, m22), a vector a pair.
Where D2 = 0 the second parts are placeholders that no code reads. Strides come in units of ALIGN elements: the
multiplication inside the kernel is what tells the compiler that rows start on 16 bytes without specialising on the
value of a stride.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(ptr, keep, ONCE: tl.constexpr):
    """Return a masked tile; ONCE marks it as the first to leave L2."""
    if ONCE:
        x = tl.load(ptr, mask=keep, other=0.0, eviction_policy="evict_first")
    else:
        x = tl.load(ptr, mask=keep, other=0.0)
    return x


@triton.jit
def load_rows(ptr, i, stride, live, W: tl.constexpr, ONCE: tl.constexpr):
    """Rows i of a [*, D] matrix as (x1, x2), zero where not live and beyond D; ONCE: they are not read again."""
    c1 = tl.arange(0, W.D1)
    keep = live[:, None]
    if W.D1 > W.D:
        keep = keep & (c1 < W.D)[None, :]
    x1 = load_tile(ptr + i[:, None] * stride + c1[None, :], keep, ONCE)
    x2 = x1
    if W.D2 > 0:
        c2 = W.D1 + tl.arange(0, W.D2)
        x2 = load_tile(ptr + i[:, None] * stride + c2[None, :], live[:, None] & (c2 < W.D)[None, :], ONCE)
    return x1, x2


@triton.jit
def store_rows(ptr, i, stride, live, x, W: tl.constexpr):
    """Write (x1, x2) to rows i, in the element type of ptr."""
    c1 = tl.arange(0, W.D1)
    keep = live[:, None]
    if W.D1 > W.D:
        keep = keep & (c1 < W.D)[None, :]
    tl.store(ptr + i[:, None] * stride + c1[None, :], x[0].to(ptr.dtype.element_ty), mask=keep)
    if W.D2 > 0:
        c2 = W.D1 + tl.arange(0, W.D2)
        keep2 = live[:, None] & (c2 < W.D)[None, :]
        tl.store(ptr + i[:, None] * stride + c2[None, :], x[1].to(ptr.dtype.element_ty), mask=keep2)


@triton.jit
def load_block(
    ptr, A0: tl.constexpr, A1: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr, A, B, SA: tl.constexpr,
    SB: tl.constexpr,
):  # fmt: skip
    """Block [A0:A0+A1, B0:B0+B1] of an [A, B] matrix with strides (SA, SB), zero outside."""
    i = A0 + tl.arange(0, A1)
    j = B0 + tl.arange(0, B1)
    return tl.load(ptr + i[:, None] * SA + j[None, :] * SB, mask=(i < A)[:, None] & (j < B)[None, :], other=0.0)


@triton.jit
def load4(ptr, A: tl.constexpr, B: tl.constexpr, SA: tl.constexpr, SB: tl.constexpr):
    """An [A, B] matrix with element strides (SA, SB) as four blocks."""
    m11 = load_block(ptr, 0, A.D1, 0, B.D1, A.D, B.D, SA, SB)
    m12 = m11
    m21 = m11
    m22 = m11
    if B.D2 > 0:
        m12 = load_block(ptr, 0, A.D1, B.D1, B.D2, A.D, B.D, SA, SB)
    if A.D2 > 0:
        m21 = load_block(ptr, A.D1, A.D2, 0, B.D1, A.D, B.D, SA, SB)
    if A.D2 > 0 and B.D2 > 0:
        m22 = load_block(ptr, A.D1, A.D2, B.D1, B.D2, A.D, B.D, SA, SB)
    return m11, m12, m21, m22


@triton.jit
def store_block(
    ptr, x, A0: tl.constexpr, A1: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr, A, B, SA: tl.constexpr,
    SB: tl.constexpr,
):  # fmt: skip
    """Inverse of load_block."""
    i = A0 + tl.arange(0, A1)
    j = B0 + tl.arange(0, B1)
    keep = (i < A)[:, None] & (j < B)[None, :]
    tl.store(ptr + i[:, None] * SA + j[None, :] * SB, x.to(ptr.dtype.element_ty), mask=keep)


@triton.jit
def store4(ptr, m, A: tl.constexpr, B: tl.constexpr, SA: tl.constexpr, SB: tl.constexpr):
    """Inverse of load4."""
    store_block(ptr, m[0], 0, A.D1, 0, B.D1, A.D, B.D, SA, SB)
    if B.D2 > 0:
        store_block(ptr, m[1], 0, A.D1, B.D1, B.D2, A.D, B.D, SA, SB)
    if A.D2 > 0:
        store_block(ptr, m[2], A.D1, A.D2, 0, B.D1, A.D, B.D, SA, SB)
    if A.D2 > 0 and B.D2 > 0:
        store_block(ptr, m[3], A.D1, A.D2, B.D1, B.D2, A.D, B.D, SA, SB)


@triton.jit
def load_vec(ptr, W: tl.constexpr):
    """Return a vector of D elements as a pair, zero beyond D."""
    c1 = tl.arange(0, W.D1)
    x1 = tl.load(ptr + c1, mask=c1 < W.D, other=0.0)
    x2 = x1
    if W.D2 > 0:
        c2 = W.D1 + tl.arange(0, W.D2)
        x2 = tl.load(ptr + c2, mask=c2 < W.D, other=0.0)
    return x1, x2


@triton.jit
def store_vec(ptr, x, W: tl.constexpr):
    """Inverse of load_vec."""
    c1 = tl.arange(0, W.D1)
    tl.store(ptr + c1, x[0], mask=c1 < W.D)
    if W.D2 > 0:
        c2 = W.D1 + tl.arange(0, W.D2)
        tl.store(ptr + c2, x[1], mask=c2 < W.D)


@triton.jit
def zeros4(A: tl.constexpr, B: tl.constexpr):
    """Return a zero matrix in float32."""
    m12 = tl.zeros([1, 1], tl.float32)
    m21 = m12
    m22 = m12
    if B.D2 > 0:
        m12 = tl.full([A.D1, B.D2], 0.0, tl.float32)
    if A.D2 > 0:
        m21 = tl.full([A.D2, B.D1], 0.0, tl.float32)
    if A.D2 > 0 and B.D2 > 0:
        m22 = tl.full([A.D2, B.D2], 0.0, tl.float32)
    return tl.full([A.D1, B.D1], 0.0, tl.float32), m12, m21, m22


@triton.jit
def zeros2(W: tl.constexpr):
    """Return a zero vector in float32."""
    x2 = tl.zeros([1], tl.float32)
    if W.D2 > 0:
        x2 = tl.full([W.D2], 0.0, tl.float32)
    return tl.full([W.D1], 0.0, tl.float32), x2


@triton.jit
def load_tail(ptr, i, stride, live, W: tl.constexpr):
    """Columns D1..D of rows i in 64 columns: the second part of a tile for products that need 64 rows of it."""
    c = W.D1 + tl.arange(0, 64)
    return tl.load(ptr + i[:, None] * stride + c[None, :], mask=live[:, None] & (c < W.D)[None, :], other=0.0)


@triton.jit
def add_dot(a, b, acc, PREC: tl.constexpr):
    """Return acc + a b; "ieee": tensor cores, which cut off what they add to, only add up the tile."""
    if PREC == "ieee":
        # a number that is not 0 keeps the sum from being folded into the product; it has no other meaning here
        acc = acc + tl.dot(a, b, input_precision=PREC, max_num_imprecise_acc=16)
    else:
        acc = tl.dot(a, b, acc, input_precision=PREC)
    return acc


@triton.jit
def outer4(acc, x, y, tail, X: tl.constexpr, Y: tl.constexpr, TAIL: tl.constexpr, PREC: tl.constexpr):
    """acc + x'y over the tokens of a tile, block 21 kept transposed until `outer4_end`: 64 rows make it a wgmma, 16
    would not. TAIL: block 22 likewise from `load_tail` of x, its rows folded by `outer4_end`.

    Transformed tiles belong in y (operand A stays as it was loaded).
    """
    a11, a12, a21, a22 = acc
    a11 = add_dot(tl.trans(x[0]), y[0], a11, PREC)
    if Y.D2 > 0:
        a12 = add_dot(tl.trans(x[0]), y[1], a12, PREC)
    if X.D2 > 0:
        a21 = add_dot(tl.trans(y[0]), x[1], a21, PREC)
    if X.D2 > 0 and Y.D2 > 0:
        a22 = corner(a22, x, y, tail, TAIL, PREC)
    return a11, a12, a21, a22


@triton.jit
def corner(acc, x, y, tail, TAIL: tl.constexpr, PREC: tl.constexpr):
    """Return acc + x2'y2."""
    if TAIL:
        acc = add_dot(tl.trans(tail), y[1], acc, PREC)
    else:
        # + 0.0: one load in two operand layouts would not be pipelined, and 16 columns cost nothing to copy
        acc = add_dot(tl.trans(x[1] + 0.0), y[1] + 0.0, acc, PREC)
    return acc


@triton.jit
def square4(acc, x, tail, X: tl.constexpr, TAIL: tl.constexpr, PREC: tl.constexpr):
    """Return acc + x'x; block 21 is the transpose of block 12 and not computed."""
    a11, a12, _, a22 = acc
    a11 = add_dot(tl.trans(x[0]), x[0], a11, PREC)
    if X.D2 > 0:
        a12 = add_dot(tl.trans(x[0]), x[1], a12, PREC)
        a22 = corner(a22, x, x, tail, TAIL, PREC)
    return a11, a12, a12, a22


@triton.jit
def outer4_end(acc, X: tl.constexpr):
    """Return the matrix that `outer4` or `square4` summed."""
    a21 = acc[2]
    a22 = acc[3]
    if X.D2 > 0:
        a21 = tl.trans(acc[2])
        if acc[3].shape[0] > X.D2:
            a22 = tl.sum(tl.reshape(acc[3], [acc[3].shape[0] // X.D2, X.D2, acc[3].shape[1]]), 0)
    return acc[0], acc[1], a21, a22


@triton.jit
def outer4_begin(A: tl.constexpr, B: tl.constexpr, SQUARE: tl.constexpr, TAIL: tl.constexpr):
    """Return the zero accumulator of `outer4`, or of `square4`."""
    m11, m12, m21, m22 = zeros4(A, B)
    if TAIL and A.D2 > 0 and B.D2 > 0:
        m22 = tl.full([64, B.D2], 0.0, tl.float32)
    if SQUARE:
        m21 = m12
    elif A.D2 > 0:
        m21 = tl.full([B.D1, A.D2], 0.0, tl.float32)
    return m11, m12, m21, m22


@triton.jit
def scale4(a, c):
    """c a, block by block."""
    return a[0] * c, a[1] * c, a[2] * c, a[3] * c


@triton.jit
def trans4(a):
    """Return a', blocks 12 and 21 swapped."""
    return tl.trans(a[0]), tl.trans(a[2]), tl.trans(a[1]), tl.trans(a[3])


@triton.jit
def cast4(a, dtype: tl.constexpr):
    """a in another dtype."""
    return a[0].to(dtype), a[1].to(dtype), a[2].to(dtype), a[3].to(dtype)


@triton.jit
def add4(a, b, A: tl.constexpr, B: tl.constexpr):
    """Return a + b, block by block: placeholders are left alone, their shapes need not agree."""
    c12 = a[1]
    c21 = a[2]
    c22 = a[3]
    if B.D2 > 0:
        c12 = a[1] + b[1]
    if A.D2 > 0:
        c21 = a[2] + b[2]
    if A.D2 > 0 and B.D2 > 0:
        c22 = a[3] + b[3]
    return a[0] + b[0], c12, c21, c22


@triton.jit
def rank1(a, x, y, A: tl.constexpr, B: tl.constexpr):
    """Return a + x y'."""
    c12 = a[1]
    c21 = a[2]
    c22 = a[3]
    if B.D2 > 0:
        c12 = a[1] + x[0][:, None] * y[1][None, :]
    if A.D2 > 0:
        c21 = a[2] + x[1][:, None] * y[0][None, :]
    if A.D2 > 0 and B.D2 > 0:
        c22 = a[3] + x[1][:, None] * y[1][None, :]
    return a[0] + x[0][:, None] * y[0][None, :], c12, c21, c22


@triton.jit
def rowmul(acc, x, m, K: tl.constexpr, B: tl.constexpr, PREC: tl.constexpr):
    """Return acc + x m for a token tile x; acc is a pair of float32 tiles."""
    o1 = tl.dot(x[0], m[0], acc[0], input_precision=PREC)
    o2 = o1
    if K.D2 > 0:
        o1 = tl.dot(x[1], m[2], o1, input_precision=PREC)
    if B.D2 > 0:
        o2 = tl.dot(x[0], m[1], acc[1], input_precision=PREC)
        if K.D2 > 0:
            o2 = tl.dot(x[1], m[3], o2, input_precision=PREC)
    return o1, o2


@triton.jit
def zero_rows(BN: tl.constexpr, W: tl.constexpr):
    """Return a pair of zero token tiles in float32."""
    o1 = tl.full([BN, W.D1], 0.0, tl.float32)
    o2 = o1
    if W.D2 > 0:
        o2 = tl.full([BN, W.D2], 0.0, tl.float32)
    return o1, o2


@triton.jit
def vecmat(x, a, A: tl.constexpr, B: tl.constexpr):
    """Return x'a, a vector over the columns of a."""
    y1 = tl.sum(a[0] * x[0][:, None], 0)
    y2 = y1
    if A.D2 > 0:
        y1 += tl.sum(a[2] * x[1][:, None], 0)
    if B.D2 > 0:
        y2 = tl.sum(a[1] * x[0][:, None], 0)
        if A.D2 > 0:
            y2 += tl.sum(a[3] * x[1][:, None], 0)
    return y1, y2


@triton.jit
def matvec(a, x, A: tl.constexpr, B: tl.constexpr):
    """Return a x, a vector over the rows of a."""
    y1 = tl.sum(a[0] * x[0][None, :], 1)
    y2 = y1
    if B.D2 > 0:
        y1 += tl.sum(a[1] * x[1][None, :], 1)
    if A.D2 > 0:
        y2 = tl.sum(a[2] * x[0][None, :], 1)
        if B.D2 > 0:
            y2 += tl.sum(a[3] * x[1][None, :], 1)
    return y1, y2


@triton.jit
def axpy2(y, a, x, W: tl.constexpr):
    """Return y + a x for vectors."""
    y2 = y[1]
    if W.D2 > 0:
        y2 = y[1] + a * x[1]
    return y[0] + a * x[0], y2


@triton.jit
def rowdot(x, y, W: tl.constexpr):
    """Return the dot product of each token in x with the vector y, or of tokens with tokens: [BN] in float32."""
    d = tl.sum(x[0].to(tl.float32) * y[0], 1)
    if W.D2 > 0:
        d += tl.sum(x[1].to(tl.float32) * y[1], 1)
    return d


@triton.jit
def eye4(c, W: tl.constexpr):
    """c times the identity."""
    i = tl.arange(0, W.D1)
    z = tl.where(i[:, None] == i[None, :], c, 0.0)
    m12 = z
    m21 = z
    m22 = z
    if W.D2 > 0:
        j = tl.arange(0, W.D2)
        m12 = tl.full([W.D1, W.D2], 0.0, tl.float32)
        m21 = tl.full([W.D2, W.D1], 0.0, tl.float32)
        m22 = tl.where(j[:, None] == j[None, :], c, 0.0)
    return z, m12, m21, m22


@triton.jit
def power_of_two(x):
    """Return the power of two at or just below x > 0 (for x = 0 the smallest normal one)."""
    return tl.exp2(tl.floor(tl.log2(tl.maximum(x, 1.2e-38))))
