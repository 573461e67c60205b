"""The D x D algebra of the split path, cut into blocks of rows so that few heads still fill the chip.

Every output row depends on one row of the left factor only: M_i = c1 P_i + c2 S_i C + (c3 R_i + c4 S_i W) P, and
likewise for the gradients (algebra.py has the same formulas on whole matrices). Tiles are BR rows high, all in float32.
"""

import triton
import triton.language as tl

from ..algebra import anchor, has
from ..heads import load_coefficients
from ..loops import as_row, means
from ..tiles import axpy2, load4, load_block, load_vec, rowdot, store_rows, store_vec, zero_rows


@triton.jit
def rows_of(ptr, r, BR: tl.constexpr, A, B: tl.constexpr, SA: tl.constexpr, SB: tl.constexpr):
    """Rows r..r+BR of an [A, B] matrix with strides (SA, SB) as a pair, zero outside."""
    i = r + tl.arange(0, BR)
    j = tl.arange(0, B.D1)
    x1 = tl.load(ptr + i[:, None] * SA + j[None, :] * SB, mask=(i < A)[:, None] & (j < B.D)[None, :], other=0.0)
    x2 = x1
    if B.D2 > 0:
        j2 = B.D1 + tl.arange(0, B.D2)
        x2 = tl.load(ptr + i[:, None] * SA + j2[None, :] * SB, mask=(i < A)[:, None] & (j2 < B.D)[None, :], other=0.0)
    return x1, x2


@triton.jit
def put_rows(ptr, r, BR: tl.constexpr, A, B: tl.constexpr, x):
    """Write a pair to rows r..r+BR of a contiguous [A, B] matrix."""
    i = r + tl.arange(0, BR)
    store_rows(ptr, i, B.D, i < A, x, B)


@triton.jit
def vec(ptr, r, BR: tl.constexpr, A):
    """Elements r..r+BR of a vector of A."""
    i = r + tl.arange(0, BR)
    return tl.load(ptr + i, mask=i < A, other=0.0)


@triton.jit
def times(x, m, BR: tl.constexpr, K: tl.constexpr, B: tl.constexpr, MID: tl.constexpr):
    """Return x m for a block of rows and a matrix of four blocks."""
    return plus_times(zero_rows(BR, B), x, m, K, B, MID)


@triton.jit
def plus_times(acc, x, m, K: tl.constexpr, B: tl.constexpr, MID: tl.constexpr):
    """Return acc + x m, the narrow columns first.

    All products of a kernel use the warp layout of the last one. Triton spreads warps along columns only if a product
    has more columns than rows; otherwise each warp would multiply the same 16 rows.
    """
    o2 = acc[1]
    if B.D2 > 0:
        o2 = tl.dot(x[0], m[1], o2, input_precision=MID)
        if K.D2 > 0:
            o2 = tl.dot(x[1], m[3], o2, input_precision=MID)
    o1 = tl.dot(x[0], m[0], acc[0], input_precision=MID)
    if K.D2 > 0:
        o1 = tl.dot(x[1], m[2], o1, input_precision=MID)
    return o1, o2


@triton.jit
def plus_times_late(
    acc, x, ptr, A: tl.constexpr, B: tl.constexpr, SA: tl.constexpr, SB: tl.constexpr, MID: tl.constexpr
):
    """`plus_times` of the matrix of `load4`, each block of which is loaded when the one before it is done with."""
    o2 = acc[1]
    if B.D2 > 0:
        o2 = tl.dot(x[0], load_block(ptr, 0, A.D1, B.D1, B.D2, A.D, B.D, SA, SB), o2, input_precision=MID)
        if A.D2 > 0:
            o2 = tl.dot(x[1], load_block(ptr, A.D1, A.D2, B.D1, B.D2, A.D, B.D, SA, SB), o2, input_precision=MID)
    o1 = tl.dot(x[0], load_block(ptr, 0, A.D1, 0, B.D1, A.D, B.D, SA, SB), acc[0], input_precision=MID)
    if A.D2 > 0:
        o1 = tl.dot(x[1], load_block(ptr, A.D1, A.D2, 0, B.D1, A.D, B.D, SA, SB), o1, input_precision=MID)
    return o1, o2


@triton.jit
def load_symmetric(ptr, A: tl.constexpr):
    """Load a symmetric [A, A] matrix as the right factor of a tf32 product, along the rows of its transpose, the layout
    that tensor cores require in shared memory."""
    return load4(ptr, A, A, 1, A.D)


@triton.jit
def dot_rows(x, y, W: tl.constexpr):
    """Return x y for a block of rows x and a vector y: [BR]."""
    return rowdot(x, as_row(y), W)


@triton.jit
def plus_rank1(x, a, y, W: tl.constexpr):
    """Return x + a y' for a block of rows x, a [BR] and a vector y."""
    return axpy2(x, a[:, None], as_row(y), W)


@triton.jit
def mul2(x, c, W: tl.constexpr):
    """Return c x."""
    x2 = x[1]
    if W.D2 > 0:
        x2 = c * x[1]
    return c * x[0], x2


@triton.jit
def state_anchor(s, n, L: tl.constexpr, V: tl.constexpr):
    """Return the vector a of `algebra.anchor`, which a state keeps with the mean value added."""
    return axpy2(load_vec(s + L.ROW, V), -1.0 / n, load_vec(s + L.SUM_V, V), V)


@triton.jit
def moment_anchor(s, scale, ORDER: tl.constexpr, L: tl.constexpr, F: tl.constexpr, V: tl.constexpr):
    """`algebra.anchor` of the moments of a state (normalised, so not centred)."""
    sums = (load_vec(s + L.SUM_Q, F), load_vec(s + L.SUM_K, F))
    MOMENT: tl.constexpr = L.C if ORDER == "hla2" else L.P
    m = load4(s + MOMENT, F, V, V.D, 1)
    return anchor((m, m, m), mul2(sums[1], scale, F), mul2(sums[0], scale, F), sums, ORDER, F, V)


@triton.jit(do_not_specialize=["N", "H", "scale"])
def hla_middle(
    state, matrix, coefficients, N, H, scale, ORDER: tl.constexpr, NORM: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    L: tl.constexpr, BR: tl.constexpr, MID: tl.constexpr, ANCHORED: tl.constexpr,
):  # fmt: skip
    """matrix [B * H, F, V] = M and, when normalised, m1 into the state; the anchor too unless ANCHORED."""
    BLOCKS: tl.constexpr = (F.D + BR - 1) // BR
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    n, scale = means(N, head, scale)
    r = (tl.program_id(0) % BLOCKS) * BR
    s = state + head * L.K
    c1, c2, c3, c4 = load_coefficients(coefficients, (head % H).to(tl.int32), ORDER)
    if ORDER == "hla2" and NORM and not ANCHORED:  # first: it reads the matrix that is multiplied
        a = moment_anchor(s, scale, ORDER, L, F, V)
    if ORDER == "linear_attention":
        m = rows_of(s + L.P, r, BR, F.D, V, V.D, 1)
    elif ORDER == "hla2":
        t = rows_of(s + L.S, r, BR, F.D, F, F.D, 1)
        m = times(t, load4(s + L.C, F, V, V.D, 1), BR, F, V, MID)
    else:
        if ORDER == "ahla":
            t = rows_of(s + L.R, r, BR, F.D, F, F.D, 1)
        else:
            si = rows_of(s + L.S, r, BR, F.D, F, F.D, 1)
            t = times(si, load_symmetric(s + L.W, F), BR, F, F, MID)
            if ORDER == "polynomial":
                t = axpy2(mul2(t, c4, F), c3, rows_of(s + L.R, r, BR, F.D, F, F.D, 1), F)
        m = times(t, load4(s + L.P, F, V, V.D, 1), BR, F, V, MID)
        if ORDER == "polynomial":
            m = axpy2(m, c2, times(si, load4(s + L.C, F, V, V.D, 1), BR, F, V, MID), V)
            m = axpy2(m, c1, rows_of(s + L.P, r, BR, F.D, V, V.D, 1), V)
    i = r + tl.arange(0, BR)
    if NORM:
        m1 = tl.zeros([BR], tl.float32)
        if ORDER == "hla2":
            m1 = scale * dot_rows(t, load_vec(s + L.SUM_Q, F), F)
        if has("R", ORDER) or has("W", ORDER):
            m1 = scale * dot_rows(t, load_vec(s + L.SUM_K, F), F)
        if ORDER == "linear_attention" or ORDER == "polynomial":
            m1 += scale * c1 * vec(s + L.SUM_K, r, BR, F.D)
        if ORDER == "polynomial":
            m1 += scale * c2 * dot_rows(si, load_vec(s + L.SUM_Q, F), F)
        tl.store(s + L.M1 + i, m1, mask=i < F.D)
        if ANCHORED:
            a = state_anchor(s, n, L, V)
        else:
            if ORDER != "hla2":
                a = moment_anchor(s, scale, ORDER, L, F, V)
            if r == 0:
                vbar = load_vec(s + L.SUM_V, V)
                store_vec(s + L.ROW, axpy2(a, 1.0 / n, vbar, V), V)
        m = plus_rank1(m, -m1, a, V)
    put_rows(matrix + head * F.D * V.D, r, BR, F.D, V, m)


@triton.jit(do_not_specialize=["N", "H", "scale"])
def hla_middle_grads_value(
    state, grads, weights, rows, coefficients, N, H, scale, ORDER: tl.constexpr, NORM: tl.constexpr,
    CENTER: tl.constexpr, MEAN: tl.constexpr, F: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BR: tl.constexpr,
    MID: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Rows over V: WP' = s (c1 dM' + c3 dM' R + c4 dM' S W), WC' = s c2 dM' S, and the row of dv."""
    BLOCKS: tl.constexpr = (V.D + BR - 1) // BR
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    n, scale = means(N, head, scale)
    r = (tl.program_id(0) % BLOCKS) * BR
    s = state + head * L.K
    g = grads + head * L.KG
    c1, c2, c3, c4 = load_coefficients(coefficients, (head % H).to(tl.int32), ORDER)
    x = rows_of(g, r, BR, V.D, F, 1 if TURNED else F.D, V.D if TURNED else 1)  # dM'_i
    if CENTER == "qk":
        x = plus_rank1(x, vec(g + V.D * F.D + F.D, r, BR, V.D) * (-1.0 / n), load_vec(s + L.SUM_Q, F), F)
    w = weights + head * L.KW
    row = tl.zeros([BR], tl.float32)
    wp = x
    if has("S", ORDER):
        y = times(x, load_symmetric(s + L.S, F), BR, F, F, MID)
        if has("C", ORDER):
            put_rows(w + L.C, r, BR, V.D, F, mul2(y, scale * c2, F))
        if has("W", ORDER):
            wp = times(y, load_symmetric(s + L.W, F), BR, F, F, MID)
    if has("R", ORDER):
        z = times(x, load4(s + L.R, F, F, F.D, 1), BR, F, F, MID)
        if ORDER == "ahla":
            wp = z
        else:
            wp = axpy2(axpy2(mul2(x, c1, F), c3, z, F), c4, wp, F)
    if has("P", ORDER):
        put_rows(w + L.P, r, BR, V.D, F, mul2(wp, scale, F))
    if MEAN:
        row = vec(g + V.D * F.D + F.D, r, BR, V.D) / n
    i = r + tl.arange(0, BR)
    tl.store(rows + head * (2 * F.D + V.D) + 2 * F.D + i, row, mask=i < V.D)
