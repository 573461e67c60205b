"""Passes that sum over the tokens of a head."""

import triton
import triton.language as tl

from ..algebra import has
from ..tiles import load_rows, load_tail, outer4, outer4_begin, outer4_end, square4, zeros2
from .extent import alive, anew
from .settle import settled


@triton.jit
def add_sum(s, x, W: tl.constexpr):
    """Return s plus the tokens of a tile, folded to the rows of s (the narrow second part: row by row), so that threads
    exchange nothing per tile."""
    s2 = s[1]
    if W.D2 > 0:
        s2 = s[1] + x[1].to(tl.float32)
    rows: tl.constexpr = s[0].shape[0]
    x1 = tl.reshape(x[0].to(tl.float32), [x[0].shape[0] // rows, rows, x[0].shape[1]])
    return s[0] + tl.sum(x1, 0), s2


@triton.jit
def begin_sum(ROWS: tl.constexpr, BN: tl.constexpr, W: tl.constexpr, NEEDED: tl.constexpr):
    """Return the accumulator of add_sum for tiles of BN tokens; ROWS: number of rows that the warps hold at once."""
    x1 = tl.zeros([1, 1], tl.float32)
    x2 = x1
    if NEEDED:
        x1 = tl.full([ROWS, W.D1], 0.0, tl.float32)
    if NEEDED and W.D2 > 0:
        x2 = tl.full([BN, W.D2], 0.0, tl.float32)
    return x1, x2


@triton.jit
def end_sum(s, W: tl.constexpr, NEEDED: tl.constexpr):
    """Return the vector summed by add_sum (zero if not needed)."""
    out = zeros2(W)
    if NEEDED:
        s2 = out[1]
        if W.D2 > 0:
            s2 = tl.sum(s[1], 0)
        out = (tl.sum(s[0], 0), s2)
    return out


@triton.jit
def begin_total(dtype: tl.constexpr, BN: tl.constexpr, W: tl.constexpr, NEEDED: tl.constexpr):
    """Return the accumulator of add_total for tiles of BN tokens of a dtype."""
    s1, s2 = begin_sum(32, BN, W, NEEDED)
    if NEEDED and dtype != tl.float32:
        s1 = tl.full([W.D1, 16], 0.0, tl.float32)
    return s1, s2


@triton.jit
def add_total(s, x, W: tl.constexpr, APART: tl.constexpr = False):
    """Return s plus the tokens of a tile that is an operand of products too, by a tensor-core product with ones;
    elementwise for float32 tokens and the narrow second part. APART: the product is not carried into the next
    iteration, for which the assembler would wait for every product of this one."""
    if x[0].dtype == tl.float32:
        out = add_sum(s, x, W)
    else:
        s2 = s[1]
        if W.D2 > 0:
            s2 = s[1] + x[1].to(tl.float32)
        ones = tl.full([x[0].shape[0], 16], 0.0625, x[0].dtype)
        if APART:
            s1 = s[0] + tl.dot(tl.trans(x[0]), ones, max_num_imprecise_acc=16)
        else:
            s1 = tl.dot(tl.trans(x[0]), ones, s[0])
        out = (s1, s2)
    return out


@triton.jit
def end_total(s, dtype: tl.constexpr, W: tl.constexpr, NEEDED: tl.constexpr):
    """Return the vector summed by add_total (zero if not needed)."""
    out = zeros2(W)
    if NEEDED and dtype == tl.float32:
        out = end_sum(s, W, NEEDED)
    elif NEEDED:
        s2 = out[1]
        if W.D2 > 0:
            s2 = tl.sum(s[1], 0)
        out = (tl.sum(s[0], 1), s2)
    return out


@triton.jit
def add_together(s, rest, x, C: tl.constexpr, W: tl.constexpr):
    """Return (s plus the tokens of a tile in column C of s [D1, 16], rest plus their second part): several sums share
    the registers of one. Not for float32 tokens."""
    if W.D2 > 0:
        rest = rest + x[1].to(tl.float32)
    column = tl.arange(0, 16)[None, :] == C
    ones = tl.broadcast_to(tl.where(column, 1.0, 0.0), [x[0].shape[0], 16]).to(x[0].dtype)
    return tl.dot(tl.trans(x[0]), ones, s), rest


@triton.jit
def end_together(s, rest, C: tl.constexpr, W: tl.constexpr):
    """Return the vector that `add_together` summed in column C."""
    x2 = tl.zeros([1], tl.float32)
    if W.D2 > 0:
        x2 = tl.sum(rest, 0)
    return tl.sum(tl.where(tl.arange(0, 16)[None, :] == C, s, 0.0), 1), x2


@triton.jit
def begin(A: tl.constexpr, B: tl.constexpr, NEEDED: tl.constexpr, SQUARE: tl.constexpr, TAIL: tl.constexpr):
    """Return the accumulator of outer4 or square4, a placeholder if not needed."""
    if NEEDED:
        out = outer4_begin(A, B, SQUARE, TAIL)
    else:
        x = tl.zeros([1, 1], tl.float32)
        out = (x, x, x, x)
    return out


@triton.jit
def end(acc, A: tl.constexpr, NEEDED: tl.constexpr):
    """Return the sum of outer4 or square4."""
    out = acc
    if NEEDED:
        out = outer4_end(acc, A)
    return out


@triton.jit
def begin_moments(ORDER: tl.constexpr, F: tl.constexpr, V: tl.constexpr, TAIL: tl.constexpr):
    """Return accumulators of (P, S, C, R, W), placeholders of those that the order does not have (`has`)."""
    mp = begin(F, V, has("P", ORDER), False, TAIL)
    ms = begin(F, F, has("S", ORDER), True, TAIL)
    mc = begin(F, V, has("C", ORDER), False, TAIL)
    mr = begin(F, F, has("R", ORDER), False, TAIL)
    mw = begin(F, F, has("W", ORDER), True, TAIL)
    return mp, ms, mc, mr, mw


@triton.jit
def add_moments(
    m, fq, fk, tv, eq, ek, ORDER: tl.constexpr, F: tl.constexpr, V: tl.constexpr, TAIL: tl.constexpr, PREC: tl.constexpr
):
    """Return m plus the products of a tile; eq and ek are the tails of q and k."""
    mp, ms, mc, mr, mw = m
    if has("P", ORDER):
        mp = outer4(mp, fk, tv, ek, F, V, TAIL, PREC)
    if has("S", ORDER):
        ms = square4(ms, fk, ek, F, TAIL, PREC)
    if has("C", ORDER):
        mc = outer4(mc, fq, tv, eq, F, V, TAIL, PREC)
    if has("R", ORDER):
        mr = outer4(mr, fk, fq, ek, F, F, TAIL, PREC)
    if has("W", ORDER):
        mw = square4(mw, fq, eq, F, TAIL, PREC)
    return mp, ms, mc, mr, mw


@triton.jit
def end_moments(m, ORDER: tl.constexpr, F: tl.constexpr):
    """Return (P, S, C, R, W)."""
    mp, ms = end(m[0], F, has("P", ORDER)), end(m[1], F, has("S", ORDER))
    mc, mr = end(m[2], F, has("C", ORDER)), end(m[3], F, has("R", ORDER))
    return mp, ms, mc, mr, end(m[4], F, has("W", ORDER))


@triton.jit
def add_gradient(
    dm, sg, g, tq, i, gn, live, SUMS: tl.constexpr, TAIL: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Return (dm + g q', sg + g) for a tile of queries and the gradients g of its outputs."""
    tg = load_rows(g, i, gn, live, V, False)
    eg = i
    if TAIL:
        eg = load_tail(g, i, gn, live, V)
    dm = outer4(dm, tg, tq, eg, V, F, TAIL, PREC)
    if SUMS:
        sg = add_total(sg, tg, V)
    return dm, sg


@triton.jit
def sum_moments(
    q, k, v, g, qn, kn, vn, gn, lo, hi, ORDER: tl.constexpr, SUMS: tl.constexpr, GRAD: tl.constexpr, ONCE: tl.constexpr,
    F: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Return (P, S, C, R, W), (sum q, sum k, sum v), dM' over tokens lo..hi.

    SUMS: "all"; "few", sums of the tokens that the order multiplies, in few registers; "keys", sum k and sum v; None.
    ONCE: k and v are not read again; let q stay in L2 instead.
    """
    FEW: tl.constexpr = SUMS == "few"
    FEW_V: tl.constexpr = FEW and ORDER != "R"
    ALL: tl.constexpr = SUMS == "all"
    KEYS: tl.constexpr = ALL or SUMS == "keys"
    TAIL: tl.constexpr = F.D2 > 0 and V.D2 > 0 and F.D1 >= 64 and V.D1 >= 64
    # addresses shared with another loop, or addresses that leave no registers for sums
    AGAIN: tl.constexpr = PREC == "ieee" and (ORDER == "CR" or (F.D2 > 0 and FEW))
    dtype: tl.constexpr = q.dtype.element_ty
    SETTLE: tl.constexpr = (ALL or FEW or KEYS) and (F.D2 > 0 or V.D2 > 0) and dtype != tl.float32
    m = begin_moments(ORDER, F, V, TAIL)
    dm = begin(V, F, GRAD, False, TAIL)
    sq = begin_total(dtype, BN, F, ALL)
    sk = begin_total(dtype, BN, F, KEYS)
    sv = begin_total(dtype, BN, V, KEYS)
    sums, rest = begin_total(dtype, BN, F, FEW)
    rq = rest
    rk = rest
    rv = rest
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    for start in tl.range(lo, hi[0], BN, disable_licm=F.D1 > 64 or (AGAIN and F.D2 > 0)):
        live = alive(start + i, hi)
        j = anew(i, start, AGAIN)
        tk = load_rows(k + (zero + start) * kn, j, kn, live, F, ONCE)
        tv = load_rows(v + (zero + start) * vn, j, vn, live, V, ONCE)
        tq = load_rows(q + (zero + start) * qn, j, qn, live, F, False)
        ek = i
        eq = i
        if TAIL:
            ek = load_tail(k + (zero + start) * kn, j, kn, live, F)
        if TAIL and (has("C", ORDER) or has("W", ORDER)):
            eq = load_tail(q + (zero + start) * qn, j, qn, live, F)
        m = add_moments(m, tq, tk, tv, eq, ek, ORDER, F, V, TAIL, PREC)
        if ALL:
            sq = add_total(sq, tq, F)
        if KEYS:
            sk = add_total(sk, tk, F)
            sv = add_total(sv, tv, V)
        if FEW:
            sums, rq = add_together(sums, rq, tq, 0, F)
            sums, rk = add_together(sums, rk, tk, 1, F)
        if FEW_V:
            sums, rv = add_together(sums, rv, tv, 2, V)
        if GRAD:
            dm, _ = add_gradient(dm, dm, g + (zero + start) * gn, tq, j, gn, live, False, TAIL, F, V, PREC)
        # the last product of the iteration
        if SETTLE and KEYS and ORDER == "CR":  # where nothing else reads sv, it and its product are removed
            sk = (settled(sk[0]), sk[1])
        if SETTLE and KEYS:
            sv = (settled(sv[0]), sv[1])
        elif SETTLE:
            sums = settled(sums)
    total = (end_total(sq, dtype, F, ALL), end_total(sk, dtype, F, KEYS), end_total(sv, dtype, V, KEYS))
    if FEW:
        total = (end_together(sums, rq, 0, F), end_together(sums, rk, 1, F), end_together(sums, rv, 2, V))
    return end_moments(m, ORDER, F), total, end(dm, V, GRAD)


@triton.jit
def sum_gradient(
    q, g, qn, gn, lo, hi, SUMS: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr
):
    """Return dM' [V, F] and sum g [V] over tokens lo..hi."""
    TAIL: tl.constexpr = F.D2 > 0 and V.D2 > 0 and F.D1 >= 64 and V.D1 >= 64
    dm = begin(V, F, True, False, TAIL)
    sg = begin_total(q.dtype.element_ty, BN, V, SUMS)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    for start in range(lo, hi[0], BN):
        live = alive(start + i, hi)
        tq = load_rows(q + (zero + start) * qn, i, qn, live, F, False)
        dm, sg = add_gradient(dm, sg, g + (zero + start) * gn, tq, i, gn, live, SUMS, TAIL, F, V, PREC)
        if SUMS and (F.D2 > 0 or V.D2 > 0) and q.dtype.element_ty != tl.float32:
            sg = (settled(sg[0]), sg[1])
    return end(dm, V, True), end_total(sg, q.dtype.element_ty, V, SUMS)
