"""Kernels with one program per (batch, head): all passes over the tokens in one launch.

Tokens are read again from the caches.

For many heads of few tokens. q, k, v, o, ... are [B, N, H, .] tensors given by strides (batch, token, head) in units
of ALIGN. Query head h reads key head h // G; gradients of k and v are written per query head (the host sums groups).
"""

import triton
import triton.language as tl

from ..algebra import (
    affine,
    affine_grad,
    anchor,
    cast_weights,
    left_factor,
    ones_moments,
    operator,
    operator_ones,
    scale_moments,
    weight_rows,
    weights,
)
from ..loops import (
    end_pairs,
    longest,
    ratio_base,
    read_out,
    span,
    sum_features,
    sum_keys,
    sum_moments,
    sum_ratio,
    write_grads,
)
from ..maps import (
    is_plain,
    is_shifted,
    kept,
    keys_alone,
    shift_of,
    unshift,
    unshift_grad,
    unshift_sums,
)
from ..tiles import axpy2, cast4, load4, load_vec, store4, store_vec, trans4, vecmat, zeros2, zeros4

NO_SPECIALIZE = [
    "qs", "ks", "vs", "os", "gs", "fqs", "fks", "dqs", "dks", "dvs", "N", "H", "G", "chunk", "scale", "ridge", "eps",
]  # fmt: skip
MULTIPROCESSORS = tl.constexpr(132)


@triton.jit
def at_head(ptr, strides, at, h, ALIGN: tl.constexpr):
    """Head h of token `at` = (batch, token), by strides of `spec.strides`; 64-bit, a tensor may have more than 2**31
    elements."""
    row = at[0].to(tl.int64) * (strides[0] // 2) + at[1] * strides[1]
    return ptr + (row + h.to(tl.int64) * (strides[2] // 2)) * ALIGN


@triton.jit
def of_head(ptrs, strides, at, h, ALIGN: tl.constexpr):
    """`at_head` of each of some tensors, then the elements from one token to the next in each."""
    heads = ()
    steps = ()
    for i in tl.static_range(len(ptrs)):
        heads += (at_head(ptrs[i], strides[i], at, h, ALIGN),)  # type: ignore[assignment]
    for i in tl.static_range(len(ptrs)):
        steps += (strides[i][1] * ALIGN,)  # type: ignore[assignment]
    return heads + steps


@triton.jit
def own_head(pid, N, H, scale):
    """What program pid of as many as there are heads works on: the head of all and the one of its sample, and `span`'s
    place, tokens and scale."""
    head = pid.to(tl.int64)
    h = pid % H
    at, N, scale = span(N, pid // H, pid, scale)
    return head, h, at, N, scale


@triton.jit
def stagger(pid, DELAY: tl.constexpr, SLOTS: tl.constexpr):
    """The first programs of a multiprocessor, SLOTS, begin DELAY nanoseconds apart. Programs that begin together stay
    together: memory waits while all of them multiply matrices, then all of them wait for memory."""
    if DELAY > 0:
        slot = pid // MULTIPROCESSORS
        if slot < SLOTS:
            tl.inline_asm_elementwise(
                "nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [slot * DELAY], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit
def load_coefficients(ptr, h, ORDER: tl.constexpr):
    """Return (c1, c2, c3, c4) of head h; ones for the orders that have none."""
    c = (1.0, 1.0, 1.0, 1.0)
    if ORDER == 5:
        p = ptr + h * 4
        c = (
            tl.load(p).to(tl.float32), tl.load(p + 1).to(tl.float32), tl.load(p + 2).to(tl.float32),
            tl.load(p + 3).to(tl.float32),
        )  # fmt: skip
    return c


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def head_forward(
    q, k, v, o, state, matrix, fq, fk, coefficients, qs, ks, vs, os, fqs, fks, N, H, G, scale, ridge, eps,
    ORDER: tl.constexpr, NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, RIDGE: tl.constexpr,
    FMAP: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, FD: tl.constexpr, OFF: tl.constexpr,
    K: tl.constexpr, SAVE: tl.constexpr, KEEP: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr, STAGES: tl.constexpr,
    PREC: tl.constexpr, MID: tl.constexpr,
):  # fmt: skip
    """o = q M of one head: moments, operator, read-out. SAVE: the operator and its vectors, for `head_gradient`. KEEP:
    the features fq, fk, which the read-out reads too."""
    pid = tl.program_id(0)
    b = pid // H
    h = pid % H
    at, N, scale = span(N, b, pid, scale)
    q = at_head(q, qs, at, h, ALIGN)
    k = at_head(k, ks, at, h // G, ALIGN)
    v = at_head(v, vs, at, h // G, ALIGN)
    o = at_head(o, os, at, h, ALIGN)
    c = load_coefficients(coefficients, h, ORDER)
    qn, kn, vn = qs[1] * ALIGN, ks[1] * ALIGN, vs[1] * ALIGN
    m1 = zeros2(F1, F2)
    a = zeros2(V1, V2)
    SUMS: tl.constexpr = NORM or MEAN or CENTER > 0 or is_shifted(FMAP)
    dtype: tl.constexpr = q.dtype.element_ty
    SHIFT: tl.constexpr = 0.0 if NORM else shift_of(FMAP, CENTER)
    ROW: tl.constexpr = MEAN or CENTER == 2 or SHIFT > 0
    ALONE: tl.constexpr = keys_alone(ORDER, NORM, CENTER, MEAN, FMAP) and dtype != tl.float32
    keep = (q, k, 0, 0)
    if KEEP:
        fq = at_head(fq, fqs, at, h, ALIGN)
        keep = (fq, at_head(fk, fks, at, h // G, ALIGN), fqs[1] * ALIGN, fks[1] * ALIGN)
    if FMAP == 0:
        raw, sums, _, _ = sum_moments(
            q, k, v, q, qn, kn, vn, qn, 0, N, ORDER, SUMS, False, True, D, F1, F2, DV, V1, V2, BN, PREC
        )
    elif ALONE:
        mp, sk, sv = sum_keys(k, v, kn, vn, 0, N, FMAP, D, F1, F2, DV, V1, V2, BN, PREC)
        raw, sums = (mp, mp, mp, mp, mp), (sk, sk, sv)
    else:
        raw, sums, _, _, _ = sum_features(
            q, k, v, q, qn, kn, vn, qn, 0, N, zeros4(1, 0, 1, 0), m1, a, eps, keep, q, ORDER, True, SUMS,
            0, False, NORM, KEEP, False, FMAP, D, F1, F2, DV, V1, V2, BN, PREC, STAGES,
        )  # fmt: skip
    n = N[1]
    if FMAP == 5:
        raw = unshift(raw, sums, n, ORDER, CENTER, MEAN or NORM, D, F1, F2, V2)
    m = scale_moments(raw, sums, scale, n, ridge, ORDER, CENTER, NORM or MEAN, RIDGE, F1, F2, V2)
    if FMAP == 5 and NORM:
        sums = unshift_sums(sums, n, D, F1, F2)
    out, t = operator(m, c, ORDER, F2, V2, MID)
    p1, q1 = ones_moments(sums, scale, CENTER, F1, F2)
    if NORM:
        m1 = operator_ones(m, t, p1, q1, c, ORDER, F2)
        a = anchor(m, p1, q1, sums, ORDER, F1, F2, V1, V2)
    out, row = affine(out, m1, sums, a, n, CENTER, MEAN, NORM, F1, F2, V1, V2, SHIFT)
    out = cast4(out, dtype)
    if SAVE:
        store4(matrix + pid.to(tl.int64) * FD * DV, out, FD, F1, F2, DV, V1, V2, DV, 1)
        to = state + pid.to(tl.int64) * K
        if not ALONE:  # `loops.first` reads the other two
            store_vec(to + OFF[5], sums[0], FD, F1, F2)
            store_vec(to + OFF[6], sums[1], FD, F1, F2)
            store_vec(to + OFF[7], sums[2], DV, V1, V2)
        store_vec(to + OFF[8], m1, FD, F1, F2)
        store_vec(to + OFF[9], row, DV, V1, V2)
    base = row
    if NORM:
        base, eps = ratio_base(out, m1, row, eps, D, is_shifted(FMAP), F1, F2, V2)
    if KEEP:
        tl.debug_barrier()  # every thread reads what others wrote
        read_out(
            fq, o, keep[2], os[1] * ALIGN, 0, N, out, m1, row, base, eps, NORM, ROW, kept(FMAP), D, F1, F2, DV,
            V1, V2, BO, PREC,
        )  # fmt: skip
    else:
        read_out(
            q, o, qn, os[1] * ALIGN, 0, N, out, m1, row, base, eps, NORM, ROW, FMAP, D, F1, F2, DV, V1, V2, BO,
            PREC,
        )  # fmt: skip


@triton.jit
def head_gradient(
    q, k, v, g, state, matrix, ratio, head, qn, kn, vn, gn, N, scale, ridge, eps, ORDER: tl.constexpr,
    NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, RIDGE: tl.constexpr, FMAP: tl.constexpr,
    D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr, FD: tl.constexpr, OFF: tl.constexpr, K: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, PREC: tl.constexpr, MID: tl.constexpr,
):  # fmt: skip
    """Compute the part of a head's backward before the gradients of tokens: M (folded), weights, rows and, with NORM,
    ratio [*, 2]. For orders up to 4; `polynomial` has a separate backward (`mixture`) or is split.

    NORM: M, m1, vbar are read from `matrix` and `state`, saved by the forward, so that one pass over the tokens gives
    the gradient of M and the moments. Otherwise M is computed from the moments.
    """
    SUMS: tl.constexpr = NORM or MEAN or CENTER > 0 or is_shifted(FMAP)
    dtype: tl.constexpr = q.dtype.element_ty
    n = N[1]
    m1 = zeros2(F1, F2)
    vbar = zeros2(V1, V2)
    a = vbar
    if NORM:
        state += head * K
        out = load4(matrix + head * FD * DV, FD, F1, F2, DV, V1, V2, DV, 1)
        m1 = load_vec(state + OFF[8], FD, F1, F2)
        vbar = load_vec(state + OFF[9], DV, V1, V2)
        sv = load_vec(state + OFF[7], DV, V1, V2)
        if is_plain(FMAP):
            raw, dm, dm1 = sum_ratio(
                q, k, v, g, q, qn, kn, vn, gn, qn, 0, N, out, m1, vbar, eps, ratio, ORDER, ORDER > 1, False, FMAP, D,
                F1, F2, DV, V1, V2, BN, PREC,
            )  # fmt: skip
            dm1 = end_pairs(dm1, F1, F2)
            sums = (load_vec(state + OFF[5], FD, F1, F2), load_vec(state + OFF[6], FD, F1, F2), sv)
        else:
            REST: tl.constexpr = 0 if dtype == tl.float32 else 1
            raw, sums, dm, dm1, _ = sum_features(
                q, k, v, g, qn, kn, vn, gn, 0, N, out, m1, vbar, eps, (q, k, 0, 0), ratio, ORDER, ORDER > 1, True,
                REST, True, True, False, False, FMAP, D, F1, F2, DV, V1, V2, BN, PREC, STAGES,
            )  # fmt: skip
            sums = (sums[0], load_vec(state + OFF[6], FD, F1, F2) if ORDER == 1 else sums[1], sv)
        a = axpy2(vbar, -1.0 / n, sv, V2)
    elif is_plain(FMAP):
        raw, sums, dm, sg = sum_moments(
            q, k, v, g, qn, kn, vn, gn, 0, N, ORDER, SUMS, True, False, D, F1, F2, DV, V1, V2, BN, PREC
        )
    else:
        raw, sums, dm, _, sg = sum_features(
            q, k, v, g, qn, kn, vn, gn, 0, N, zeros4(1, 0, 1, 0), m1, vbar, eps, (q, k, 0, 0), ratio, ORDER, True,
            SUMS, 0, True, False, False, False, FMAP, D, F1, F2, DV, V1, V2, BN, PREC, STAGES,
        )  # fmt: skip
    if is_shifted(FMAP) and NORM:
        raw = unshift(raw, unshift_sums(sums, -n, D, F1, F2), n, ORDER, CENTER, True, D, F1, F2, V2)
    elif is_shifted(FMAP):
        raw = unshift(raw, sums, n, ORDER, CENTER, MEAN, D, F1, F2, V2)
        if CENTER < 2:
            dm = unshift_grad(dm, sg, D, F1, F2, V2)
    centred = sums
    if is_shifted(FMAP) and NORM:
        centred = unshift_sums(sums, -n, D, F1, F2)
    m = scale_moments(raw, centred, scale, n, ridge, ORDER, CENTER, NORM or MEAN, RIDGE, F1, F2, V2)
    p1, q1 = ones_moments(sums, scale, CENTER, F1, F2)
    row_q, row_v = zeros2(F1, F2), zeros2(V1, V2)
    c = (1.0, 1.0, 1.0, 1.0)
    if NORM:
        t = left_factor(m, c, ORDER, F2, MID)
        dm1 = axpy2(dm1, -1.0, vecmat(a, dm, V2, F2), F2)
    else:
        dm1 = m1
        out, t = operator(m, c, ORDER, F2, V2, MID)
        out, vbar = affine(out, m1, sums, a, n, CENTER, MEAN, NORM, F1, F2, V1, V2, 0.0)
        dm, row_q, row_v = affine_grad(dm, out, sums, sg, n, CENTER, MEAN, F1, F2, V1, V2)
    w = weights(m, t, dm, dm1, p1, q1, scale, ORDER, NORM, F2, V2, MID)
    SHIFT: tl.constexpr = 1.0 if is_shifted(FMAP) else 0.0
    rows = weight_rows(w, m, t, dm1, sums, row_q, row_v, scale, n, ORDER, CENTER, MEAN, NORM, SHIFT, F1, F2, V2, dtype)
    return out, w, rows


@triton.jit
def ratio_of(ratio, head, most, NORM: tl.constexpr):
    """1 / den and d loss / d den of a head's tokens [*, 2] of a buffer [B * H, most, 2]; a number without NORM."""
    out = most
    if NORM:
        out = ratio + head * 2 * most
    return out


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def head_backward(
    q, k, v, g, state, matrix, ratio, out_rows, dq, dk, dv, qs, ks, vs, gs, dqs, dks, dvs, N, H, G, scale, ridge, eps,
    ORDER: tl.constexpr, NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr,
    RIDGE: tl.constexpr, FMAP: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr,
    DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, FD: tl.constexpr,
    OFF: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr, STAGES: tl.constexpr, PREC: tl.constexpr,
    MID: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv of one head; the moments are summed again."""
    pid = tl.program_id(0)
    b = pid // H
    h = pid % H
    most = longest(N)
    at, N, scale = span(N, b, pid, scale)
    q = at_head(q, qs, at, h, ALIGN)
    k = at_head(k, ks, at, h // G, ALIGN)
    v = at_head(v, vs, at, h // G, ALIGN)
    g = at_head(g, gs, at, h, ALIGN)
    qn, kn, vn, gn = qs[1] * ALIGN, ks[1] * ALIGN, vs[1] * ALIGN, gs[1] * ALIGN
    head = pid.to(tl.int64)
    ratio = ratio_of(ratio, head, most, NORM)
    out, w, rows = head_gradient(
        q, k, v, g, state, matrix, ratio, head, qn, kn, vn, gn, N, scale, ridge, eps, ORDER, NORM, CENTER, MEAN, RIDGE,
        FMAP, D, F1, F2, DV, V1, V2, FD, OFF, K, BN, STAGES, PREC, MID,
    )  # fmt: skip
    if NORM:
        out_rows += head * (2 * FD + DV)
        store_vec(out_rows, rows[0], FD, F1, F2)
        store_vec(out_rows + FD, rows[1], FD, F1, F2)
        store_vec(out_rows + 2 * FD, rows[2], DV, V1, V2)
        tl.debug_barrier()  # every thread reads what others wrote
        rows = (out_rows, out_rows + FD, out_rows + 2 * FD)
    m1 = state
    if NORM:
        m1 = state + head * K + OFF[8]
    mt = cast4(trans4(out), q.dtype.element_ty)
    w, unit = cast_weights(w, ORDER, q.dtype.element_ty, F2, V2)
    write_grads(
        q, k, v, g, at_head(dq, dqs, at, h, ALIGN), at_head(dk, dks, at, h, ALIGN), at_head(dv, dvs, at, h, ALIGN), qn,
        kn, vn, gn, dqs[1] * ALIGN, dks[1] * ALIGN, dvs[1] * ALIGN, 0, N, mt, m1, ratio, w, unit, rows, 0, ORDER,
        NORM, MEAN or CENTER > 0 or is_shifted(FMAP), FMAP, D, F1, F2, DV, V1, V2, FD, BO, PREC,
    )  # fmt: skip


@triton.jit
def store_coefficients(ptr, head, dc):
    """Store d coefficients [4] of one head, if needed."""
    if ptr is not None:
        tl.store(ptr + head * 4, dc[0])
        tl.store(ptr + head * 4 + 1, dc[1])
        tl.store(ptr + head * 4 + 2, dc[2])
        tl.store(ptr + head * 4 + 3, dc[3])


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def head_weights(
    q, k, v, g, state, matrix, ratio, out_weights, out_rows, qs, ks, vs, gs, N, H, G, scale, ridge, eps,
    ORDER: tl.constexpr, NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr,
    RIDGE: tl.constexpr, FMAP: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr,
    DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, FD: tl.constexpr,
    OFF: tl.constexpr, K: tl.constexpr, WOFF: tl.constexpr, KW: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    PREC: tl.constexpr, MID: tl.constexpr,
):  # fmt: skip
    """`head_backward` up to its last pass, left to `split.apply_grads`: for heads whose weights and tokens do not fit
    together."""
    pid = tl.program_id(0)
    b = pid // H
    h = pid % H
    most = longest(N)
    at, N, scale = span(N, b, pid, scale)
    qn, kn, vn, gn = qs[1] * ALIGN, ks[1] * ALIGN, vs[1] * ALIGN, gs[1] * ALIGN
    head = pid.to(tl.int64)
    out, w, rows = head_gradient(
        at_head(q, qs, at, h, ALIGN), at_head(k, ks, at, h // G, ALIGN), at_head(v, vs, at, h // G, ALIGN),
        at_head(g, gs, at, h, ALIGN), state, matrix, ratio_of(ratio, head, most, NORM), head, qn, kn, vn, gn,
        N, scale, ridge, eps, ORDER, NORM, CENTER, MEAN, RIDGE, FMAP, D, F1, F2, DV, V1, V2, FD, OFF, K, BN,
        STAGES, PREC, MID,
    )  # fmt: skip
    if not NORM:
        store4(matrix + head * FD * DV, out, FD, F1, F2, DV, V1, V2, DV, 1)
    to = out_weights + head * KW
    if ORDER != 2:
        store4(to + WOFF[0], w[0], DV, V1, V2, FD, F1, F2, FD, 1)
    if ORDER == 2 or ORDER == 4:
        store4(to + WOFF[1], w[1], FD, F1, F2, FD, F1, F2, FD, 1)
    if ORDER == 2:
        store4(to + WOFF[2], w[2], DV, V1, V2, FD, F1, F2, FD, 1)
    if ORDER == 3:
        store4(to + WOFF[3], w[3], FD, F1, F2, FD, F1, F2, FD, 1)
    if ORDER == 4:
        store4(to + WOFF[4], w[4], FD, F1, F2, FD, F1, F2, FD, 1)
    if NORM or MEAN or CENTER > 0 or is_shifted(FMAP):
        to = out_rows + head * (2 * FD + DV)
        store_vec(to, rows[0], FD, F1, F2)
        store_vec(to + FD, rows[1], FD, F1, F2)
        store_vec(to + 2 * FD, rows[2], DV, V1, V2)
