"""Kernel `hla_reduce_moments`: the moments of one part of a head."""

import triton
import triton.language as tl

from ..algebra import anchor, has, ones_moments, scale_moments
from ..heads import at_head
from ..loops import place, span, sum_moments, upto
from ..tiles import axpy2, store4, store_vec

NO_SPECIALIZE = ["qs", "ks", "vs", "N", "H", "G", "PARTS", "chunk", "heads", "scale", "ridge"]


@triton.jit
def store_state(
    state, m, sums, ORDER: tl.constexpr, SUMS: tl.constexpr, L: tl.constexpr, F: tl.constexpr, V: tl.constexpr
):
    """Write the moments (natural orientation) and the token sums of one head."""
    if has("P", ORDER):
        store4(state + L.P, m[0], F, V, V.D, 1)
    if has("S", ORDER):
        store4(state + L.S, m[1], F, F, F.D, 1)
    if has("C", ORDER):
        store4(state + L.C, m[2], F, V, V.D, 1)
    if has("R", ORDER):
        store4(state + L.R, m[3], F, F, F.D, 1)
    if has("W", ORDER):
        store4(state + L.W, m[4], F, F, F.D, 1)
    if SUMS:
        store_vec(state + L.SUM_Q, sums[0], F)
        store_vec(state + L.SUM_K, sums[1], F)
        store_vec(state + L.SUM_V, sums[2], V)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def hla_reduce_moments(
    q, k, v, state, qs, ks, vs, N, H, G, PARTS, chunk, heads, scale, ridge, ORDER: tl.constexpr, NORM: tl.constexpr,
    CENTER: tl.constexpr, MEAN: tl.constexpr, RIDGE: tl.constexpr, ALIGN: tl.constexpr, F: tl.constexpr,
    V: tl.constexpr, L: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr, FINAL: tl.constexpr, ROLES: tl.constexpr,
):  # fmt: skip
    """Compute partial sums of one part of one head, state [PARTS, B * H, K]; FINAL (one part): scaled and centred.

    ROLES, for polynomial, the number of neighbouring programs for the same tokens: 2 sum P, S, W and C, R; 5 (no ratio
    or ridge): one moment each, and the first one all sums.
    """
    b, h, part = place(H, PARTS, ROLES)
    at, N, scale = span(N, b, b * H + h, scale)
    q = at_head(q, qs, at, h, ALIGN)
    k = at_head(k, ks, at, h // G, ALIGN)
    v = at_head(v, vs, at, h // G, ALIGN)
    out = state + (part.to(tl.int64) * heads + b * H + h) * L.K
    lo = part * chunk
    hi = upto(lo + chunk, N)
    n = N[1]
    tn = (qs[1] * ALIGN, ks[1] * ALIGN, vs[1] * ALIGN)
    SUMS: tl.constexpr = NORM or MEAN or CENTER is not None
    role = tl.program_id(0) % ROLES
    for i in tl.static_range(ROLES):
        if role == i:
            part_moments(
                q, k, v, tn, out, lo, hi, n, scale, ridge, moments_of(i, ROLES, ORDER), i == 0,
                sums_of(i, ROLES, SUMS, FINAL, ORDER == "linear_attention" and NORM), NORM, CENTER, MEAN, RIDGE, F, V,
                L, BN, PREC, FINAL,
            )  # fmt: skip


@triton.constexpr_function
def moments_of(i, roles, order):
    """Return ORDER of `sum_moments` for program i of so many per part."""
    return {1: (order,), 2: ("PSW", "CR"), 5: "PWSCR"}[roles][i]


@triton.constexpr_function
def sums_of(i, roles, sums, final, keys):
    """Return SUMS of `sum_moments` for program i; final: every program needs what it centres; keys: no sum of q."""
    if not sums or (i > 0 and not final):
        return None
    return "few" if roles == 5 else "keys" if keys else "all"


@triton.jit
def part_moments(
    q, k, v, tn, out, lo, hi, n, scale, ridge, ORDER: tl.constexpr, FIRST: tl.constexpr, SUMS: tl.constexpr,
    NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, RIDGE: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    L: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """Sum the moments of one order over tokens lo..hi and write them. FIRST: the sums and the anchor too."""
    m, sums, _ = sum_moments(q, k, v, q, tn[0], tn[1], tn[2], tn[0], lo, hi, ORDER, SUMS, False, False, F, V, BN, PREC)
    if FINAL:
        m = scale_moments(m, sums, scale, n, ridge, ORDER, CENTER, NORM or MEAN, RIDGE, F, V)
    if FINAL and NORM and FIRST:
        p1, q1 = ones_moments(sums, scale, CENTER, F)
        row = axpy2(anchor(m, p1, q1, sums, ORDER, F, V), 1.0 / n, sums[2], V)
        store_vec(out + L.ROW, row, V)
    store_state(out, m, sums, ORDER, SUMS is not None and FIRST, L, F, V)
