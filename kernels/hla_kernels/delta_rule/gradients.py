"""Kernel of the gradients of the delta rule: q, k, a, b and log_f of one chunk of tokens.

S_t and the gradient G_t of a token in a chunk are not stored. With S the state at the start of the chunk, P the
gradient of the state at its end, gi and ge as in `chunked`, z_t = B_t' S_{t-1} and y_t = A_t' G_t,

    dq_t =  S_t do_t     =  exp(gi_t) S do_t + sum_{j <= t} exp(gi_t - gi_j) (k_j <v_j, do_t> - a_j <z_j, do_t>)
    db_t = -S_{t-1} y_t  = -exp(ge_t) S y_t  - sum_{j < t} exp(ge_t - gi_j) (k_j <v_j, y_t> - a_j <z_j, y_t>)
    dk_t =  G_t v_t      =  exp(gi_C - gi_t) P v_t + sum_{j >= t} exp(gi_j - gi_t) q_j <do_j, v_t>
                                                   - sum_{j > t} exp(ge_j - gi_t) b_j <y_j, v_t>
    da_t = -G_t z_t, likewise

    dlog_f of the first token = sum over values of exp(gi_1) G_1 o S
      = exp(gi_C) sum of P o S + sum_t exp(gi_t) q_t o S do_t - sum_{t > 1} exp(ge_t) b_t o S y_t
    dlog_f_{t+1} = dlog_f_t - (q o dq - k o dk - a o da)_t - (b o db)_{t+1}
"""

import triton
import triton.language as tl

from .tiles import accurate, decays_of, load_rows, load_state, store_rows, tokens_of


@triton.jit
def over_ranks(x, C: tl.constexpr, RP: tl.constexpr, BD: tl.constexpr):
    """[C RP, BD] -> [C, BD]."""
    return tl.sum(tl.reshape(x, [C, RP, BD]), 1) if RP > 1 else x


@triton.jit(do_not_specialize=["N", "heads"])
def gradients(
    STATES, ENDS, Q, K, V, F, A, B, Z, Y, DO, DQ, DK, DA, DB, DF, N, heads, D: tl.constexpr, DV: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, FD: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, C: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """Compute DQ, DK [B, N, H, D], DA, DB [B, N, H, R, D] and DF [B, N, H, FD]; one program per head and chunk.

    STATES, ENDS [B, H, chunks, D, Dv], Q, K [B, N, H, D], V, DO [B, N, H, Dv], F [B, N, H, FD], A, B [B, N, H, R, D],
    Z, Y [B, N, H, R, Dv], contiguous. BD, BV: channels per tile; RP: R, padded to a power of two.
    """
    bh, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    bn, h = bh // heads * N, bh % heads
    one, all_ranks = tokens_of(c * C, C, 1, False), tokens_of(c * C, C, RP, False)
    i, ir = tl.arange(0, C), tl.arange(0, C * RP) // RP
    of_v, of_z = tl.zeros([C, C], tl.float32), tl.zeros([C, C * RP], tl.float32)  # <do, v>, <do, z>
    y_v, y_z = tl.zeros([C * RP, C], tl.float32), tl.zeros([C * RP, C * RP], tl.float32)
    for j in range((DV + BV - 1) // BV):
        grad = load_rows(DO, one, bn, h, heads, N, DV, 1, 1, j * BV, BV)
        v = tl.trans(load_rows(V, one, bn, h, heads, N, DV, 1, 1, j * BV, BV))
        of_v = accurate(grad, v, of_v)
        if R > 0:
            y = load_rows(Y, all_ranks, bn, h, heads, N, DV, R, RP, j * BV, BV)
            z = tl.trans(load_rows(Z, all_ranks, bn, h, heads, N, DV, R, RP, j * BV, BV))
            of_z = accurate(grad, z, of_z)
            y_v = accurate(y, v, y_v)
            y_z = accurate(y, z, y_z)
    of_v = tl.where(i[:, None] >= i[None, :], of_v, 0.0)
    of_z = tl.where(i[:, None] >= ir[None, :], of_z, 0.0)
    y_v = tl.where(ir[:, None] > i[None, :], y_v, 0.0)
    y_z = tl.where(ir[:, None] > ir[None, :], y_z, 0.0)
    df_all = tl.zeros([C], tl.float32)
    at = (bh * tl.num_programs(1) + c) * D * DV
    for j in range((D + BD - 1) // BD):
        # states with rows of values, by decays
        s_do, p_v = tl.zeros([C, BD], tl.float32), tl.zeros([C, BD], tl.float32)
        s_y, p_z = tl.zeros([C * RP, BD], tl.float32), tl.zeros([C * RP, BD], tl.float32)
        both = tl.zeros([BD], tl.float32)
        for e in range((DV + BV - 1) // BV):
            s = load_state(STATES + at, j * BD, e * BV, D, DV, BD, BV)
            p = load_state(ENDS + at, j * BD, e * BV, D, DV, BD, BV)
            both += tl.sum(s * p, 0)
            s_do = accurate(load_rows(DO, one, bn, h, heads, N, DV, 1, 1, e * BV, BV), s, s_do)
            p_v = accurate(load_rows(V, one, bn, h, heads, N, DV, 1, 1, e * BV, BV), p, p_v)
            if R > 0:
                s_y = accurate(load_rows(Y, all_ranks, bn, h, heads, N, DV, R, RP, e * BV, BV), s, s_y)
                p_z = accurate(load_rows(Z, all_ranks, bn, h, heads, N, DV, R, RP, e * BV, BV), p, p_z)
        gi, _, m, total = decays_of(F, one, bn, h, heads, N, D, FD, 1, C, j * BD, BD, LEAST)
        q = load_rows(Q, one, bn, h, heads, N, D, 1, 1, j * BD, BD)
        k = load_rows(K, one, bn, h, heads, N, D, 1, 1, j * BD, BD)
        far, near = tl.exp(gi - m[None, :]), tl.exp(m[None, :] - gi)
        s_do *= tl.exp(gi)
        dq = accurate(of_v, k * near, tl.zeros([C, BD], tl.float32))
        dk = accurate(tl.trans(of_v), q * far, tl.zeros([C, BD], tl.float32))
        df = tl.exp(total) * both + tl.sum(q * s_do, 0)
        if R > 0:
            gr, er, _, _ = decays_of(F, all_ranks, bn, h, heads, N, D, FD, RP, C, j * BD, BD, LEAST)
            a = load_rows(A, all_ranks, bn, h, heads, N, D, R, RP, j * BD, BD)
            b = load_rows(B, all_ranks, bn, h, heads, N, D, R, RP, j * BD, BD)
            far_b, near_a = tl.exp(er - m[None, :]), tl.exp(m[None, :] - gr)
            s_y *= tl.exp(er)
            dq = accurate(of_z, -a * near_a, dq)
            dk = accurate(tl.trans(y_v), -b * far_b, dk)
            db = accurate(y_z, a * near_a, tl.zeros([C * RP, BD], tl.float32))
            db = accurate(y_v, -k * near, db) * far_b - s_y
            da = accurate(tl.trans(y_z), b * far_b, tl.zeros([C * RP, BD], tl.float32))
            da = accurate(tl.trans(of_z), -q * far, da) * near_a - p_z * tl.exp(total[None, :] - gr)
            df -= tl.sum(tl.where((ir > 0)[:, None], b * s_y, 0.0), 0)
            store_rows(DA, da, all_ranks, bn, h, heads, N, D, R, RP, j * BD)
            store_rows(DB, db, all_ranks, bn, h, heads, N, D, R, RP, j * BD)
        dq = dq * far + s_do
        dk = dk * near + p_v * tl.exp(total[None, :] - gi)
        store_rows(DQ, dq, one, bn, h, heads, N, D, 1, 1, j * BD)
        store_rows(DK, dk, one, bn, h, heads, N, D, 1, 1, j * BD)
        before = q * dq - k * dk  # changes dlog_f of the next token
        change = before
        if R > 0:
            own = over_ranks(tl.where((ir > 0)[:, None], b * db, 0.0), C, RP, BD)
            before -= over_ranks(a * da, C, RP, BD)
            change = before + own
        df_of = df[None, :] - (tl.cumsum(change, 0) - before)
        if FD > 1:
            store_rows(DF, df_of, one, bn, h, heads, N, D, 1, 1, j * BD)
        else:
            df_all += tl.sum(df_of, 1)
    if FD == 1:
        tl.store(DF + (bn + one) * heads + h, df_all, one < N)
