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

from .tiles import accurate, decays_of, load_rows, load_state, product, store_rows, tokens_of


@triton.jit
def local(a, b, acc, R: tl.constexpr):
    """Return acc + a b; for ranks up to 1 as accurate as float32, for which rank 2 has too few registers."""
    return product(a, b, acc) if R > 1 else accurate(a, b, acc)


@triton.jit
def over_ranks(x, C: tl.constexpr, RP: tl.constexpr, BD: tl.constexpr):
    """[C RP, BD] -> [C, BD]."""
    return tl.sum(tl.reshape(x, [C, RP, BD]), 1) if RP > 1 else x


@triton.jit(do_not_specialize=["N", "heads"])
def delta_rule_gradients(
    STATES, ENDS, Q, K, V, F, A, B, Z, Y, DO, DQ, DK, DA, DB, DF, N, heads, D: tl.constexpr, DV: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, FD: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, C: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """Compute DQ, DK [B, N, H, D], DA, DB [B, N, H, R, D] and DF [B, N, H, D], or if FD = 1 its sums over tiles
    [B, N, H, tiles]; one program per head, chunk and tile of BD channels.

    STATES, ENDS [B, H, chunks, D, Dv], Q, K [B, N, H, D], V, DO [B, N, H, Dv], F [B, N, H, FD], A, B [B, N, H, R, D],
    Z, Y [B, N, H, R, Dv], contiguous. BV: channels per tile of values; RP: R, padded to a power of two.
    """
    bh, c, start = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BD
    bn, h = bh // heads * N, bh % heads
    one, all_ranks = tokens_of(c * C, C, 1, False), tokens_of(c * C, C, RP, False)
    i, ir = tl.arange(0, C), tl.arange(0, C * RP) // RP
    do_v, do_z = tl.zeros([C, C], tl.float32), tl.zeros([C, C * RP], tl.float32)
    y_v, y_z = tl.zeros([C * RP, C], tl.float32), tl.zeros([C * RP, C * RP], tl.float32)
    do_s, v_p = tl.zeros([C, BD], tl.float32), tl.zeros([C, BD], tl.float32)
    y_s, z_p = tl.zeros([C * RP, BD], tl.float32), tl.zeros([C * RP, BD], tl.float32)
    df = tl.zeros([BD], tl.float32)
    STATES += (bh * tl.num_programs(1) + c) * D * DV
    ENDS += (bh * tl.num_programs(1) + c) * D * DV
    for j in range((DV + BV - 1) // BV):
        s, p = load_state(STATES, start, j * BV, D, DV, BD, BV), load_state(ENDS, start, j * BV, D, DV, BD, BV)
        grad = load_rows(DO, one, bn, h, heads, N, DV, 1, 1, j * BV, BV)
        v = load_rows(V, one, bn, h, heads, N, DV, 1, 1, j * BV, BV)
        df += tl.sum(s * p, 0)
        do_s = product(grad, s, do_s)
        v_p = product(v, p, v_p)
        do_v = product(grad, tl.trans(v), do_v)
        if R > 0:
            y = load_rows(Y, all_ranks, bn, h, heads, N, DV, R, RP, j * BV, BV)
            z = load_rows(Z, all_ranks, bn, h, heads, N, DV, R, RP, j * BV, BV)
            y_s = product(y, s, y_s)
            z_p = product(z, p, z_p)
            do_z = product(grad, tl.trans(z), do_z)
            y_v = product(y, tl.trans(v), y_v)
            y_z = product(y, tl.trans(z), y_z)
    do_v = tl.where(i[:, None] >= i[None, :], do_v, 0.0)
    gi, _, m, total = decays_of(F, one, bn, h, heads, N, D, FD, 1, C, start, BD, LEAST)
    far, near = tl.exp(gi - m[None, :]), tl.exp(m[None, :] - gi)
    q = load_rows(Q, one, bn, h, heads, N, D, 1, 1, start, BD)
    k = load_rows(K, one, bn, h, heads, N, D, 1, 1, start, BD)
    do_s *= tl.exp(gi)
    df = tl.exp(total) * df + tl.sum(q * do_s, 0)  # of the first token
    dq = local(do_v, k * near, tl.zeros([C, BD], tl.float32), R)
    dk = local(tl.trans(do_v), q * far, tl.zeros([C, BD], tl.float32), R)
    if R > 0:
        do_z = tl.where(i[:, None] >= ir[None, :], do_z, 0.0)
        y_v = tl.where(ir[:, None] > i[None, :], y_v, 0.0)
        y_z = tl.where(ir[:, None] > ir[None, :], y_z, 0.0)
        gr, er, _, _ = decays_of(F, all_ranks, bn, h, heads, N, D, FD, RP, C, start, BD, LEAST)
        far_b, near_a = tl.exp(er - m[None, :]), tl.exp(m[None, :] - gr)
        a = load_rows(A, all_ranks, bn, h, heads, N, D, R, RP, start, BD)
        b = load_rows(B, all_ranks, bn, h, heads, N, D, R, RP, start, BD)
        y_s *= tl.exp(er)
        df -= tl.sum(tl.where((ir > 0)[:, None], b * y_s, 0.0), 0)
        dq = local(do_z, -a * near_a, dq, R)
        dk = local(tl.trans(y_v), -b * far_b, dk, R)
        db = local(y_z, a * near_a, tl.zeros([C * RP, BD], tl.float32), R)
        db = local(y_v, -k * near, db, R) * far_b - y_s
        da = local(tl.trans(y_z), b * far_b, tl.zeros([C * RP, BD], tl.float32), R)
        da = local(tl.trans(do_z), -q * far, da, R) * near_a - z_p * tl.exp(total[None, :] - gr)
        store_rows(DA, da, all_ranks, bn, h, heads, N, D, R, RP, start)
        store_rows(DB, db, all_ranks, bn, h, heads, N, D, R, RP, start)
    dq = dq * far + do_s
    dk = dk * near + v_p * tl.exp(total[None, :] - gi)
    store_rows(DQ, dq, one, bn, h, heads, N, D, 1, 1, start)
    store_rows(DK, dk, one, bn, h, heads, N, D, 1, 1, start)
    later = q * dq - k * dk  # dlog_f loses it from the next token on, and `own` from this one on
    own = tl.zeros([C, BD], tl.float32)
    if R > 0:
        later -= over_ranks(a * da, C, RP, BD)
        own = over_ranks(tl.where((ir > 0)[:, None], b * db, 0.0), C, RP, BD)
    df_of = df[None, :] + later - tl.cumsum(later + own, 0)
    if FD > 1:
        store_rows(DF, df_of, one, bn, h, heads, N, D, 1, 1, start)
    else:
        store_rows(DF, tl.sum(df_of, 1)[:, None], one, bn, h, heads, N, tl.num_programs(2), 1, 1, tl.program_id(2))
