"""The passes over tokens when a head is cut into several programs: reduce -> (combine) -> middle -> apply, forward and
backward.

`state` holds, per (batch, head) and in float32, the moments P [F, V], S, C [F, V], R, W [F, F] an operator needs and
the vectors sum q, sum k [F], sum v [V], m1 [F], anchor [V]; OFF are their offsets in this order and K is the length.
Every program writes its own partial sums, which `combine` adds in a fixed order: no atomics, the same bits every time.
"""

import triton
import triton.language as tl

from .algebra import anchor, cast_weights, centre_rows, ones_moments, scale_moments, source
from .heads import at_head, ratio_of
from .loops import (
    end_pairs,
    longest,
    ratio_base,
    read_out,
    span,
    sum_divided,
    sum_features,
    sum_gradient,
    sum_keys,
    sum_moments,
    sum_ratio,
    upto,
    write_grads,
)
from .maps import (
    centre_columns,
    centre_softmax,
    is_plain,
    is_shifted,
    keys_alone,
    shift_of,
    unshift,
    unshift_grad,
    unshift_sums,
)
from .tiles import axpy2, cast4, load4, load_vec, store4, store_vec, trans4, vecmat, zeros2, zeros4

NO_SPECIALIZE = [
    "qs", "ks", "vs", "os", "gs", "fqs", "fks", "dqs", "dks", "dvs", "N", "H", "G", "PARTS", "chunk", "heads", "scale",
    "ridge", "eps",
]  # fmt: skip


@triton.jit
def place(H, PARTS):
    """(batch, head, part) of this program; neighbouring programs read neighbouring heads of the same tokens."""
    pid = tl.program_id(0)
    return pid // (H * PARTS), pid % H, (pid // H) % PARTS


@triton.jit
def store_state(
    state, m, sums, ORDER: tl.constexpr, SUMS: tl.constexpr, OFF: tl.constexpr, FD: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
):  # fmt: skip
    """Write the moments (natural orientation) and the token sums of one head."""
    if (ORDER != 2 and ORDER < 6) or ORDER == 11:
        store4(state + OFF[0], m[0], FD, F1, F2, DV, V1, V2, DV, 1)
    if ORDER == 2 or ORDER == 4 or ORDER == 5 or ORDER == 8 or ORDER == 11:
        store4(state + OFF[1], m[1], FD, F1, F2, FD, F1, F2, FD, 1)
    if ORDER == 2 or ORDER == 5 or ORDER == 6 or ORDER == 9 or ORDER == 12:
        store4(state + OFF[2], m[2], FD, F1, F2, DV, V1, V2, DV, 1)
    if ORDER == 3 or ORDER == 5 or ORDER == 6 or ORDER == 10:
        store4(state + OFF[3], m[3], FD, F1, F2, FD, F1, F2, FD, 1)
    if ORDER == 4 or ORDER == 5 or ORDER == 7 or ORDER == 12:
        store4(state + OFF[4], m[4], FD, F1, F2, FD, F1, F2, FD, 1)
    if SUMS and ORDER != 11:
        store_vec(state + OFF[5], sums[0], FD, F1, F2)
    if SUMS and ORDER != 12:
        store_vec(state + OFF[6], sums[1], FD, F1, F2)
        store_vec(state + OFF[7], sums[2], DV, V1, V2)


@triton.constexpr_function
def order_of(i, roles, order):
    """The order of `begin_moments` that program i of up to 3 a part sums."""
    return ((order,), (4, 6), (11, 12, 10))[roles - 1][i]


@triton.constexpr_function
def sums_of(i, roles, sums, rest):
    """SUMS of `sum_features` of that program; rest: whether the second of 2 needs them."""
    return ((sums,), (2 if sums else 0, sums and rest), (sums, sums, False))[roles - 1][i]


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def reduce_moments(
    q, k, v, state, fq, fk, qs, ks, vs, fqs, fks, N, H, G, PARTS, chunk, heads, scale, ridge, ORDER: tl.constexpr,
    NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, KEEP: tl.constexpr, RIDGE: tl.constexpr,
    FMAP: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, FD: tl.constexpr, OFF: tl.constexpr,
    K: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, PREC: tl.constexpr, REST: tl.constexpr,
    FINAL: tl.constexpr, ROLES: tl.constexpr,
):  # fmt: skip
    """Partial sums of one part of one head, state [PARTS, B * H, K]; FINAL (one part): scaled and centred at once.

    REST: sums of features to twice their digits, which gradients of the normalised form need. ROLES = 2 (polynomial):
    neighbouring programs sum P, S, W and C, R of the same tokens; 3 (a ratio, not centred): P and S, C and W, R; 5 (of
    the tokens as they are, no ridge): one each. KEEP: the features go to fq, fk.
    """
    pid = tl.program_id(0) // ROLES
    b = pid // (H * PARTS)
    h = pid % H
    part = (pid // H) % PARTS
    at, N, scale = span(N, b, b * H + h, scale)
    q = at_head(q, qs, at, h, ALIGN)
    k = at_head(k, ks, at, h // G, ALIGN)
    v = at_head(v, vs, at, h // G, ALIGN)
    out = state + (part.to(tl.int64) * heads + b * H + h) * K
    lo = part * chunk
    hi = upto(lo + chunk, N)
    n = N[1]
    tn = (qs[1] * ALIGN, ks[1] * ALIGN, vs[1] * ALIGN)
    SUMS: tl.constexpr = NORM or MEAN or CENTER > 0 or is_shifted(FMAP)
    keep = (q, k, 0, 0)
    if KEEP:
        keep = (at_head(fq, fqs, at, h, ALIGN), at_head(fk, fks, at, h // G, ALIGN), fqs[1] * ALIGN, fks[1] * ALIGN)
    role = tl.program_id(0) % ROLES
    for i in tl.static_range(ROLES):
        if ROLES == 5:
            if role == i:
                part_moments(
                    q, k, v, tn, out, keep, lo, hi, n, scale, ridge, 1 if i == 0 else 6 + i, False, False, 0, False,
                    False, False, 0, D, R1, R2, F1, F2, DV, V1, V2, FD, OFF, BN, STAGES, PREC, 0, FINAL,
                )  # fmt: skip
        elif role == i:
            part_moments(
                q, k, v, tn, out, keep, lo, hi, n, scale, ridge, order_of(i, ROLES, ORDER),
                sums_of(i, ROLES, SUMS, FINAL or FMAP == 5), NORM, CENTER, MEAN, KEEP, RIDGE, FMAP, D, R1, R2, F1, F2,
                DV, V1, V2, FD, OFF, BN, STAGES, PREC, REST, FINAL,
            )  # fmt: skip


@triton.jit
def part_moments(
    q, k, v, tn, out, keep, lo, hi, n, scale, ridge, ORDER: tl.constexpr, SUMS: tl.constexpr, NORM: tl.constexpr,
    CENTER: tl.constexpr, MEAN: tl.constexpr, KEEP: tl.constexpr, RIDGE: tl.constexpr, FMAP: tl.constexpr,
    D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr, FD: tl.constexpr, OFF: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    PREC: tl.constexpr, REST: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """Sum the moments of one order over tokens lo..hi and write them."""
    if FMAP == 0 and REST == 0:
        m, sums, _, _ = sum_moments(
            q, k, v, q, tn[0], tn[1], tn[2], tn[0], lo, hi, ORDER, 1 if SUMS else 0, False, False, D, F1, F2, DV, V1,
            V2, BN, PREC,
        )
    elif keys_alone(ORDER, NORM, CENTER, MEAN, FMAP) and k.dtype.element_ty != tl.float32:
        mp, sk, sv = sum_keys(k, v, tn[1], tn[2], lo, hi, FMAP, D, F1, F2, DV, V1, V2, BN, PREC)
        m, sums = (mp, mp, mp, mp, mp), (sk, sk, sv)
    else:
        m, sums, _, _, _ = sum_features(
            q, k, v, q, tn[0], tn[1], tn[2], tn[0], lo, hi, zeros4(1, 0, 1, 0), zeros2(F1, F2), zeros2(V1, V2), 0.0,
            keep, q, ORDER, True, SUMS, REST, False, NORM, KEEP, True, FMAP, D, R1, R2, F1, F2, DV, V1, V2, BN,
            PREC, STAGES,
        )  # fmt: skip
    if FMAP == 5:  # what the number of tokens adds, the first part adds for all
        m = unshift(m, sums, tl.where(lo == 0, n, 0.0), ORDER, CENTER, MEAN or NORM, D, F1, F2, V2)
    if FINAL:
        m = scale_moments(m, sums, scale, n, ridge, ORDER, CENTER, NORM or MEAN, RIDGE, F1, F2, V2)
    if FINAL and NORM and FMAP == 5:
        sums = unshift_sums(sums, n, D, F1, F2)
    store_state(out, m, sums, ORDER, SUMS and ORDER != 6, OFF, FD, F1, F2, DV, V1, V2)
    if FINAL and NORM and ORDER < 5:
        p1, q1 = ones_moments(sums, scale, CENTER, F1, F2)
        row = axpy2(anchor(m, p1, q1, sums, ORDER, F1, F2, V1, V2), 1.0 / n, sums[2], V2)
        store_vec(out + OFF[9], row, DV, V1, V2)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def apply(
    q, o, state, matrix, qs, os, N, H, PARTS, chunk, eps, NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr,
    FMAP: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, FD: tl.constexpr, OFF: tl.constexpr,
    K: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """o = q M for one part of one head; matrix [B * H, F, V] is in the dtype of the tokens."""
    b, h, part = place(H, PARTS)
    at, N, _ = span(N, b, b * H + h, 0.0)
    head = (b * H + h).to(tl.int64)
    state += head * K
    lo = part * chunk
    m = load4(matrix + head * FD * DV, FD, F1, F2, DV, V1, V2, DV, 1)
    m1 = zeros2(F1, F2)
    row = zeros2(V1, V2)
    SHIFT: tl.constexpr = 0.0 if NORM else shift_of(FMAP, CENTER, NORM, D)
    ROW: tl.constexpr = MEAN or CENTER == 2 or SHIFT > 0
    n = N[1]
    if NORM:
        m1 = load_vec(state + OFF[8], FD, F1, F2)
        row = load_vec(state + OFF[9], DV, V1, V2)
    if MEAN:
        row = axpy2(row, 1.0 / n, load_vec(state + OFF[7], DV, V1, V2), V2)
    if CENTER == 2 or SHIFT > 0:
        sq = m1
        if CENTER == 2:
            sq = load_vec(state + OFF[5], FD, F1, F2)
        row = axpy2(row, 1.0, vecmat(source(sq, n, CENTER == 2, SHIFT, F1, F2), m, F2, V2), V2)
    base = row
    if NORM:
        base, eps = ratio_base(m, m1, row, eps, D, is_shifted(FMAP), F1, F2, V2)
    read_out(
        at_head(q, qs, at, h, ALIGN), at_head(o, os, at, h, ALIGN), qs[1] * ALIGN, os[1] * ALIGN, lo,
        upto(lo + chunk, N), cast4(m, q.dtype.element_ty), m1, row, base, eps, NORM, ROW, FMAP, D, R1, R2, F1, F2, DV,
        V1, V2, BN, PREC,
    )  # fmt: skip


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def reduce_readout(
    q, g, state, matrix, ratio, out, qs, gs, N, H, PARTS, chunk, heads, eps, ORDER: tl.constexpr, NORM: tl.constexpr,
    SUMS: tl.constexpr, FMAP: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, FD: tl.constexpr,
    OFF: tl.constexpr, K: tl.constexpr, KG: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, PREC: tl.constexpr,
    CENTER: tl.constexpr, TURNED: tl.constexpr, REST: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    """Partial dM' [V, F] (TURNED: dM [F, V]) and sum g [V] of one part of one head -> out [PARTS, B * H, KG];
    normalised, the gradients of m1 [F] with and without the mean value instead of sum g, and ratio [B * H, N, 2]
    (DIVIDED: it is there)."""
    b, h, part = place(H, PARTS)
    most = longest(N)
    at, N, _ = span(N, b, b * H + h, 0.0)
    head = (b * H + h).to(tl.int64)
    lo = part * chunk
    PULLED: tl.constexpr = ORDER == 5 and REST < 3 and FMAP != 3 and FMAP != 4
    PLANES: tl.constexpr = 2 if PULLED and REST == 2 else 1
    m = zeros2(16, 0)
    m1 = zeros2(F1, F2)
    vbar = zeros2(V1, V2)
    if NORM:
        m1 = load_vec(state + head * K + OFF[8], FD, F1, F2)
    if NORM and not DIVIDED:
        vbar = load_vec(state + head * K + OFF[9], DV, V1, V2)
        m = load4(matrix + head * FD * DV, FD, F1, F2, DV, V1, V2, DV, 1)
        m = cast4(m, tl.float32 if REST == 3 or PLANES == 2 else q.dtype.element_ty)
    q = at_head(q, qs, at, h, ALIGN)
    g = at_head(g, gs, at, h, ALIGN)
    qn, gn = qs[1] * ALIGN, gs[1] * ALIGN
    hi = upto(lo + chunk, N)
    ratio = ratio_of(ratio, head, most, NORM)
    sg = vbar
    if is_plain(FMAP) and not NORM and REST == 0:
        dm, sg = sum_gradient(q, g, qn, gn, lo, hi, SUMS, D, F1, F2, DV, V1, V2, BN, PREC)
    elif DIVIDED:
        dm, dm1 = sum_divided(q, g, qn, gn, lo, hi, m1, eps, ratio, FMAP, D, F1, F2, DV, V1, V2, BN, PREC)
    elif NORM and (PULLED or (is_plain(FMAP) and REST == 0)):
        _, dm, dm1 = sum_ratio(
            q, q, g, g, q, qn, qn, gn, gn, qn, lo, hi, m, m1, vbar, eps, ratio, ORDER, False, False, FMAP, D, F1, F2,
            DV, V1, V2, BN, PREC, PLANES,
        )  # fmt: skip
        dm1 = end_pairs(dm1, F1, F2)
    else:
        _, _, dm, dm1, sg = sum_features(
            q, q, g, g, qn, qn, gn, gn, lo, hi, m, m1, vbar, eps, (q, q, 0, 0), ratio, ORDER, False, SUMS, REST,
            True, NORM, False, False, FMAP, D, R1, R2, F1, F2, DV, V1, V2, BN, PREC, STAGES,
        )  # fmt: skip
    if is_shifted(FMAP) and not NORM and CENTER < 2:
        dm = unshift_grad(dm, sg, D, F1, F2, V2)
    out += (part.to(tl.int64) * heads + head) * KG
    store4(out, dm, DV, V1, V2, FD, F1, F2, 1 if TURNED else FD, DV if TURNED else 1)
    if NORM:  # what m1 has through the anchor a = vbar - mean v of M too; here, where dM' is at hand
        vbar = load_vec(state + head * K + OFF[9], DV, V1, V2)
        centred = axpy2(dm1, -1.0, vecmat(vbar, dm, V2, F2), F2)
        mean = load_vec(state + head * K + OFF[7], DV, V1, V2)
        store_vec(out + DV * FD, axpy2(centred, 1.0 / N[1], vecmat(mean, dm, V2, F2), F2), FD, F1, F2)
        store_vec(out + DV * FD + FD, centred, FD, F1, F2)
    if SUMS and not NORM:
        store_vec(out + DV * FD + FD, sg, DV, V1, V2)


@triton.jit
def load_weights(
    w, ORDER: tl.constexpr, WOFF: tl.constexpr, FD: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr,
):  # fmt: skip
    """(WP', WS, WC', WR', WW) as far as the order has them; the others repeat one that it has."""
    if ORDER == 2:
        wc = load4(w + WOFF[2], DV, V1, V2, FD, F1, F2, FD, 1)
        ws = load4(w + WOFF[1], FD, F1, F2, FD, F1, F2, FD, 1)
        out = (wc, ws, wc, ws, ws)
    else:
        wp = load4(w + WOFF[0], DV, V1, V2, FD, F1, F2, FD, 1)
        ws = wp
        wc = wp
        wr = wp
        ww = wp
        if ORDER >= 4:
            ws = load4(w + WOFF[1], FD, F1, F2, FD, F1, F2, FD, 1)
            ww = load4(w + WOFF[4], FD, F1, F2, FD, F1, F2, FD, 1)
        if ORDER == 5:
            wc = load4(w + WOFF[2], DV, V1, V2, FD, F1, F2, FD, 1)
        if ORDER == 3 or ORDER == 5:
            wr = load4(w + WOFF[3], FD, F1, F2, FD, F1, F2, FD, 1)
        out = (wp, ws, wc, wr, ww)
    return out


@triton.jit
def part_grads(
    tokens, grads, tn, gn, lo, hi, n, ratio, state, matrix, weights, rows, PART: tl.constexpr, ORDER: tl.constexpr,
    NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, FMAP: tl.constexpr, D: tl.constexpr, R1: tl.constexpr,
    R2: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    FD: tl.constexpr, OFF: tl.constexpr, WOFF: tl.constexpr, ROWS_DONE: tl.constexpr, BN: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Load the weights of one part of the gradients and write it for tokens lo..hi."""
    ROW: tl.constexpr = MEAN or CENTER > 0 or is_shifted(FMAP)
    FILLED: tl.constexpr = MEAN or CENTER > 0 or ROWS_DONE
    mt = trans4(load4(matrix, FD, F1, F2, DV, V1, V2, DV, 1))
    w = load_weights(weights, ORDER, WOFF, FD, F1, F2, DV, V1, V2)
    m1 = state + OFF[8]
    if NORM:
        row = (rows, rows + FD, rows + 2 * FD)
    elif ROW and FILLED:
        row = (load_vec(rows, FD, F1, F2), load_vec(rows + FD, FD, F1, F2), load_vec(rows + 2 * FD, DV, V1, V2))
    else:
        row = (zeros2(F1, F2), zeros2(F1, F2), zeros2(V1, V2))
    if ROW and not NORM and not ROWS_DONE:
        sums = (
            load_vec(state + OFF[5], FD, F1, F2),
            load_vec(state + OFF[6], FD, F1, F2),
            load_vec(state + OFF[7], DV, V1, V2),
        )
        SHIFT: tl.constexpr = 1.0 if is_shifted(FMAP) else 0.0
        row = centre_rows(w, sums, row[0], row[1], row[2], n, ORDER, CENTER, MEAN, SHIFT, F1, F2, V2)
    more = row
    if FMAP == 3 or FMAP == 4:
        w, more = centre_softmax(w, ORDER, NORM, FMAP, D, F1, F2, V1, V2)
        if not NORM:
            mt, _ = centre_columns(mt, FMAP, D, V2, F2)
    mt = cast4(mt, tokens[0].dtype.element_ty)
    w, unit = cast_weights(w, ORDER, tokens[0].dtype.element_ty, F2, V2)
    write_grads(
        tokens[0], tokens[1], tokens[2], tokens[3], grads[0], grads[1], grads[2], tn[0], tn[1], tn[2], tn[3], gn[0],
        gn[1], gn[2], lo, hi, mt, m1, ratio, w, unit, row, more, PART, ORDER, NORM, ROW, FMAP, D, R1, R2, F1, F2,
        DV, V1, V2, FD, BN, PREC,
    )  # fmt: skip


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def apply_grads(
    q, k, v, g, dq, dk, dv, state, matrix, ratio, weights, rows, qs, ks, vs, gs, dqs, dks, dvs, N, H, G, PARTS, chunk,
    ORDER: tl.constexpr, NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, FMAP: tl.constexpr,
    ALIGN: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr,
    DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, FD: tl.constexpr, OFF: tl.constexpr, K: tl.constexpr,
    WOFF: tl.constexpr, KW: tl.constexpr, BN: tl.constexpr, ROLES: tl.constexpr, ROWS_DONE: tl.constexpr,
    JOIN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv of one part of one head from the weights [B * H, KW] of `middle_grads` at WOFF and rows
    [B * H, 2 F + V].

    ROLES = 2: neighbours write dq, and dk with dv (JOIN: dq with dv, of ahla from the same keys, and dk): half
    the weights stay resident in each. ROLES = 3: dq, dk and dv. ROWS_DONE: `head_weights` has centred the rows.
    """
    pid = tl.program_id(0) // ROLES
    h = pid % H
    part = (pid // H) % PARTS
    b = pid // (H * PARTS)
    most = longest(N)
    at, N, _ = span(N, b, b * H + h, 0.0)
    head = (b * H + h).to(tl.int64)
    ratio = ratio_of(ratio, head, most, NORM)
    lo = part * chunk
    hi = upto(lo + chunk, N)
    n = N[1]
    tokens = (
        at_head(q, qs, at, h, ALIGN), at_head(k, ks, at, h // G, ALIGN), at_head(v, vs, at, h // G, ALIGN),
        at_head(g, gs, at, h, ALIGN),
    )  # fmt: skip
    grads = (at_head(dq, dqs, at, h, ALIGN), at_head(dk, dks, at, h, ALIGN), at_head(dv, dvs, at, h, ALIGN))
    tn = (qs[1] * ALIGN, ks[1] * ALIGN, vs[1] * ALIGN, gs[1] * ALIGN)
    gn = (dqs[1] * ALIGN, dks[1] * ALIGN, dvs[1] * ALIGN)
    state += head * K
    matrix += head * FD * DV
    weights += head * KW
    rows += head * (2 * FD + DV)
    if ROLES == 1:
        part_grads(
            tokens, grads, tn, gn, lo, hi, n, ratio, state, matrix, weights, rows, 0, ORDER, NORM, CENTER, MEAN, FMAP,
            D, R1, R2, F1, F2, DV, V1, V2, FD, OFF, WOFF, ROWS_DONE, BN, PREC,
        )  # fmt: skip
    elif tl.program_id(0) % ROLES == 0:
        part_grads(
            tokens, grads, tn, gn, lo, hi, n, ratio, state, matrix, weights, rows, 5 if JOIN else 1, ORDER, NORM,
            CENTER, MEAN, FMAP, D, R1, R2, F1, F2, DV, V1, V2, FD, OFF, WOFF, ROWS_DONE, BN, PREC,
        )  # fmt: skip
    elif tl.program_id(0) % ROLES == 1:
        part_grads(
            tokens, grads, tn, gn, lo, hi, n, ratio, state, matrix, weights, rows, 3 if JOIN else ROLES, ORDER, NORM,
            CENTER, MEAN, FMAP, D, R1, R2, F1, F2, DV, V1, V2, FD, OFF, WOFF, ROWS_DONE, BN, PREC,
        )  # fmt: skip
    else:
        part_grads(
            tokens, grads, tn, gn, lo, hi, n, ratio, state, matrix, weights, rows, 4, ORDER, NORM, CENTER, MEAN, FMAP,
            D, R1, R2, F1, F2, DV, V1, V2, FD, OFF, WOFF, ROWS_DONE, BN, PREC,
        )  # fmt: skip
