"""Kernel `hla_apply_grads` of the backward: dq, dk, dv of one part of a head."""

import triton
import triton.language as tl

from ..algebra import cast_operator, cast_weights, centre_rows, has
from ..heads import at_head, ratio_of
from ..loops import longest, place, span, upto, write_grads
from ..tiles import axpy2, load4, load_vec, trans4, zeros2

NO_SPECIALIZE = ["qs", "ks", "vs", "gs", "dqs", "dks", "dvs", "N", "H", "G", "PARTS", "chunk"]


@triton.jit
def load_weights(w, ORDER: tl.constexpr, L: tl.constexpr, F: tl.constexpr, V: tl.constexpr):
    """Load the weights (WP', WS, WC', WR', WW) of an order; weights that it does not have repeat another one."""
    if ORDER == "hla2":
        wc = load4(w + L.C, V, F, F.D, 1)
        ws = load4(w + L.S, F, F, F.D, 1)
        out = (wc, ws, wc, ws, ws)
    else:
        wp = load4(w + L.P, V, F, F.D, 1)
        ws = wp
        wc = wp
        wr = wp
        ww = wp
        if has("W", ORDER):
            ws = load4(w + L.S, F, F, F.D, 1)
            ww = load4(w + L.W, F, F, F.D, 1)
        if has("C", ORDER):
            wc = load4(w + L.C, V, F, F.D, 1)
        if has("R", ORDER):
            wr = load4(w + L.R, F, F, F.D, 1)
        out = (wp, ws, wc, wr, ww)
    return out


@triton.jit
def read_rows(rows, F: tl.constexpr, V: tl.constexpr):
    """Load the rows of dq, dk, dv."""
    return load_vec(rows, F), load_vec(rows + F.D, F), load_vec(rows + 2 * F.D, V)


@triton.jit
def part_grads(
    tokens, grads, tn, gn, lo, hi, n, ratio, state, matrix, weights, rows, PART: tl.constexpr, ORDER: tl.constexpr,
    NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, F: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    ROWS_DONE: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Load the weights of one part of the gradients and write it for tokens lo..hi."""
    ROW: tl.constexpr = MEAN or CENTER is not None
    mt = trans4(load4(matrix, F, V, V.D, 1))
    w = load_weights(weights, ORDER, L, F, V)
    m1 = state + L.M1
    if NORM:
        row = (rows, rows + F.D, rows + 2 * F.D)
    elif ROW and ROWS_DONE:
        row = read_rows(rows, F, V)
    else:
        row = (zeros2(F), zeros2(F), zeros2(V))
    if ROW and not NORM and not ROWS_DONE:
        sums = (load_vec(state + L.SUM_Q, F), load_vec(state + L.SUM_K, F), load_vec(state + L.SUM_V, V))
        read, unit = cast_weights(w, ORDER, tokens[0].dtype.element_ty, F, V)
        row = centre_rows(read, unit, sums, row[0], row[1], row[2], n, ORDER, CENTER, MEAN, F, V)
        more = read_rows(rows, F, V)  # loaded last to save registers
        row = (axpy2(row[0], 1.0, more[0], F), axpy2(row[1], 1.0, more[1], F), axpy2(row[2], 1.0, more[2], V))
    mt, mt_unit = cast_operator(mt, tokens[0].dtype.element_ty, NORM, V, F)
    w, unit = cast_weights(w, ORDER, tokens[0].dtype.element_ty, F, V)
    write_grads(
        tokens[0], tokens[1], tokens[2], tokens[3], grads[0], grads[1], grads[2], tn[0], tn[1], tn[2], tn[3], gn[0],
        gn[1], gn[2], lo, hi, mt, m1, ratio, w, unit, row, PART, ORDER, NORM, ROW, F,
        V, BN, PREC, mt_unit=mt_unit,
    )  # fmt: skip


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def hla_apply_grads(
    q, k, v, g, dq, dk, dv, state, matrix, ratio, weights, rows, qs, ks, vs, gs, dqs, dks, dvs, N, H, G, PARTS, chunk,
    ORDER: tl.constexpr, NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, ALIGN: tl.constexpr,
    F: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BN: tl.constexpr, ROLES: tl.constexpr, ROWS_DONE: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk, dv of one part of one head from the weights [B * H, KW] of `middle_grads` and rows
    [B * H, 2 F + V].

    ROLES = 2: neighbouring programs write dq, and dk with dv, so that each holds half of the weights. ROLES = 3:
    separate programs for dq, dk and dv. ROWS_DONE: the rows are centred already.
    """
    b, h, part = place(H, PARTS, ROLES)
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
    state += head * L.K
    matrix += head * F.D * V.D
    weights += head * L.KW
    rows += head * (2 * F.D + V.D)
    if ROLES == 1:
        part_grads(
            tokens, grads, tn, gn, lo, hi, n, ratio, state, matrix, weights, rows, "qkv", ORDER, NORM, CENTER, MEAN,
            F, V, L, ROWS_DONE, BN, PREC,
        )  # fmt: skip
    elif tl.program_id(0) % ROLES == 0:
        part_grads(
            tokens, grads, tn, gn, lo, hi, n, ratio, state, matrix, weights, rows, "q", ORDER, NORM, CENTER, MEAN,
            F, V, L, ROWS_DONE, BN, PREC,
        )  # fmt: skip
    elif tl.program_id(0) % ROLES == 1:
        part_grads(
            tokens, grads, tn, gn, lo, hi, n, ratio, state, matrix, weights, rows, "kv" if ROLES == 2 else "k", ORDER,
            NORM, CENTER, MEAN, F, V, L, ROWS_DONE, BN, PREC,
        )  # fmt: skip
    else:
        part_grads(
            tokens, grads, tn, gn, lo, hi, n, ratio, state, matrix, weights, rows, "v", ORDER, NORM, CENTER, MEAN,
            F, V, L, ROWS_DONE, BN, PREC,
        )  # fmt: skip
