"""Kernel `reduce_moments`: the moments of one part of a head."""

import triton
import triton.language as tl

from ..algebra import anchor, ones_moments, scale_moments
from ..heads import at_head
from ..loops import place, span, sum_features, sum_keys, sum_moments, upto
from ..maps import is_shifted, keys_alone, unshift, unshift_sums
from ..tiles import axpy2, store4, store_vec, zeros2, zeros4

NO_SPECIALIZE = ["qs", "ks", "vs", "fqs", "fks", "N", "H", "G", "PARTS", "chunk", "heads", "scale", "ridge"]


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
    """Return the order of `begin_moments` for program i of up to 3 per part."""
    return ((order,), (4, 6), (11, 12, 10))[roles - 1][i]


@triton.constexpr_function
def sums_of(i, roles, sums, rest):
    """Return SUMS of `sum_features` for program i; rest: whether the second of 2 programs needs sums."""
    return ((sums,), (2 if sums else 0, sums and rest), (sums, sums, False))[roles - 1][i]


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def reduce_moments(
    q, k, v, state, fq, fk, qs, ks, vs, fqs, fks, N, H, G, PARTS, chunk, heads, scale, ridge, ORDER: tl.constexpr,
    NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, KEEP: tl.constexpr, RIDGE: tl.constexpr,
    FMAP: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, FD: tl.constexpr, OFF: tl.constexpr,
    K: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, PREC: tl.constexpr, REST: tl.constexpr,
    FINAL: tl.constexpr, ROLES: tl.constexpr,
):  # fmt: skip
    """Compute partial sums of one part of one head, state [PARTS, B * H, K]; FINAL (one part): scaled and centred.

    REST: sums of features in two digits, for gradients of the normalised form. ROLES, for polynomial, the number of
    neighbouring programs for the same tokens: 2 sum P, S, W and C, R; 3 (a ratio, not centred): P and S, C and W, R; 5
    (no feature map, ratio or ridge): one moment each, and the first one all sums. KEEP: store the features in fq, fk.
    """
    b, h, part = place(H, PARTS, ROLES)
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
                    q, k, v, tn, out, keep, lo, hi, n, scale, ridge, 1 if i == 0 else 6 + i,
                    3 if SUMS and (i == 0 or FINAL) else 0, False, CENTER, MEAN, False, False, 0, D, F1, F2,
                    DV, V1, V2, FD, OFF, BN, STAGES, PREC, 0, FINAL,
                )  # fmt: skip
        elif role == i:
            part_moments(
                q, k, v, tn, out, keep, lo, hi, n, scale, ridge, order_of(i, ROLES, ORDER),
                sums_of(i, ROLES, SUMS, FINAL or FMAP == 5), NORM, CENTER, MEAN, KEEP, RIDGE, FMAP, D, F1, F2,
                DV, V1, V2, FD, OFF, BN, STAGES, PREC, REST, FINAL,
            )  # fmt: skip


@triton.jit
def part_moments(
    q, k, v, tn, out, keep, lo, hi, n, scale, ridge, ORDER: tl.constexpr, SUMS: tl.constexpr, NORM: tl.constexpr,
    CENTER: tl.constexpr, MEAN: tl.constexpr, KEEP: tl.constexpr, RIDGE: tl.constexpr, FMAP: tl.constexpr,
    D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr, FD: tl.constexpr, OFF: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    PREC: tl.constexpr, REST: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """Sum the moments of one order over tokens lo..hi and write them. SUMS = 3: without a feature map, all sums in few
    registers."""
    if FMAP == 0 and REST == 0:
        m, sums, _, _ = sum_moments(
            q, k, v, q, tn[0], tn[1], tn[2], tn[0], lo, hi, ORDER, (2 if SUMS == 3 else 1) if SUMS else 0, False,
            False, D, F1, F2, DV, V1, V2, BN, PREC,
        )
    elif keys_alone(ORDER, NORM, CENTER, MEAN, FMAP) and k.dtype.element_ty != tl.float32:
        mp, sk, sv = sum_keys(k, v, tn[1], tn[2], lo, hi, FMAP, D, F1, F2, DV, V1, V2, BN, PREC)
        m, sums = (mp, mp, mp, mp, mp), (sk, sk, sv)
    else:
        m, sums, _, _, _ = sum_features(
            q, k, v, q, tn[0], tn[1], tn[2], tn[0], lo, hi, zeros4(1, 0, 1, 0), zeros2(F1, F2), zeros2(V1, V2), 0.0,
            keep, q, ORDER, True, SUMS, REST, False, NORM, KEEP, True, FMAP, D, F1, F2, DV, V1, V2, BN,
            PREC, STAGES,
        )  # fmt: skip
    if FMAP == 5:  # the first part adds the term of the number of tokens for all parts
        m = unshift(m, sums, tl.where(lo == 0, n, 0.0), ORDER, CENTER, MEAN or NORM, D, F1, F2, V2)
    if FINAL:
        m = scale_moments(m, sums, scale, n, ridge, ORDER, CENTER, NORM or MEAN, RIDGE, F1, F2, V2)
    if FINAL and NORM and FMAP == 5:
        sums = unshift_sums(sums, n, D, F1, F2)
    if FINAL and NORM and ORDER < 5:
        p1, q1 = ones_moments(sums, scale, CENTER, F1, F2)
        row = axpy2(anchor(m, p1, q1, sums, ORDER, F1, F2, V1, V2), 1.0 / n, sums[2], V2)
        store_vec(out + OFF[9], row, DV, V1, V2)
    store_state(out, m, sums, ORDER, SUMS and (ORDER < 6 or ORDER > 10), OFF, FD, F1, F2, DV, V1, V2)
