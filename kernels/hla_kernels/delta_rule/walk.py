"""Kernels of the delta rule over chunks of 16 tokens.

`delta_rule_solve` each, `delta_rule_walk` through them, `delta_rule_read` each.

With S the state at the start of a chunk, gi and ge as in `chunked`, counted from the start of the chunk, and g = gi:

    solve   (I + M) Z = (b exp(ge)) S + <b, k> V, hence Z = W S + U        M = <b, a>, pairs i > j; <b, k> i > j
    walk    S <- exp(gi_C) S + (k exp(gi_C - g))' V - (a exp(gi_C - gi))' Z
    read    O = (q exp(g)) S + <q, k> V - <q, a> Z                         pairs i >= j

M^16 = 0, so that (I + M)^-1 = (I - M)(I + M^2)(I + M^4)(I + M^8). Scores <x_i, y_j> are products of x exp(g - m) and
y exp(m - g), m the sum of log_f over the first half of the chunk: with log_f of at least `LEAST` both stay in the range
of float32.

REVERSE runs the adjoint, from the last token to the first one: with P_t the gradient of S_t by later tokens and z_t
what b_t, an argument, reads of it after the write of its token,

    G_t = P_t + k_t v_t'     o_t = G_t' q_t     z_t = G_t' b_t     P_{t-1} = D_t G_t - a_t z_t'

A token's write comes before its decay and its erasure there: g = ge, <b, k> has pairs i >= j and <q, a> i > j.
"""

import triton
import triton.language as tl

from .tiles import accurate, decays_of, load_rows, load_state, product, store_rows, store_state, tokens_of


@triton.jit(do_not_specialize=["N", "heads"])
def delta_rule_solve(
    K, V, F, A, B, W, U, N, heads, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    FD: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, C: tl.constexpr, LEAST: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Compute W [B, N, H, R, D] and U [B, N, H, R, Dv]; one program per head and chunk of C tokens.

    K [B, N, H, D], V [B, N, H, Dv], F [B, N, H, FD], A, B [B, N, H, R, D], contiguous. BD, BV: channels per tile; RP:
    R, padded to a power of two.
    """
    bh, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * C
    bn, h = bh // heads * N, bh % heads
    one, all_ranks = tokens_of(first, C, 1, REVERSE), tokens_of(first, C, RP, REVERSE)
    i, ir = tl.arange(0, C), tl.arange(0, C * RP) // RP
    bk, m1 = tl.zeros([C * RP, C], tl.float32), tl.zeros([C * RP, C * RP], tl.float32)
    for j in range((D + BD - 1) // BD):
        gi, g, m, _ = decays_of(F, one, bn, h, heads, N, D, FD, 1, C, j * BD, BD, LEAST)
        if not REVERSE:
            g = gi
        near = load_rows(K, one, bn, h, heads, N, D, 1, 1, j * BD, BD) * tl.exp(m[None, :] - g)
        gr, er, _, _ = decays_of(F, all_ranks, bn, h, heads, N, D, FD, RP, C, j * BD, BD, LEAST)
        reading = load_rows(B, all_ranks, bn, h, heads, N, D, R, RP, j * BD, BD) * tl.exp(er - m[None, :])
        erased = load_rows(A, all_ranks, bn, h, heads, N, D, R, RP, j * BD, BD) * tl.exp(m[None, :] - gr)
        bk = product(reading, tl.trans(near), bk)
        m1 = product(reading, tl.trans(erased), m1)
    bk = tl.where((ir[:, None] >= i[None, :]) if REVERSE else (ir[:, None] > i[None, :]), bk, 0.0)
    m1 = tl.where(ir[:, None] > ir[None, :], m1, 0.0)
    inverse = tl.where(tl.arange(0, C * RP)[:, None] == tl.arange(0, C * RP)[None, :], 1.0, 0.0) - m1
    power = m1
    for _doubling in tl.static_range(3):
        power = accurate(power, power, tl.zeros([C * RP, C * RP], tl.float32))
        inverse = accurate(inverse, power, inverse)
    for j in range((D + BD - 1) // BD):
        _, er, _, _ = decays_of(F, all_ranks, bn, h, heads, N, D, FD, RP, C, j * BD, BD, LEAST)
        decayed = load_rows(B, all_ranks, bn, h, heads, N, D, R, RP, j * BD, BD) * tl.exp(er)
        w = product(inverse, decayed, tl.zeros([C * RP, BD], tl.float32))
        store_rows(W, w, all_ranks, bn, h, heads, N, D, R, RP, j * BD)
    bk = accurate(inverse, bk, tl.zeros([C * RP, C], tl.float32))
    for j in range((DV + BV - 1) // BV):
        v = load_rows(V, one, bn, h, heads, N, DV, 1, 1, j * BV, BV)
        store_rows(U, product(bk, v, tl.zeros([C * RP, BV], tl.float32)), all_ranks, bn, h, heads, N, DV, R, RP, j * BV)


@triton.jit(do_not_specialize=["N", "heads"])
def delta_rule_walk(
    K, V, F, A, W, U, FIRST, STATES, Z, LAST, N, heads, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, FD: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, C: tl.constexpr, LEAST: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Compute the states before all chunks, STATES [B, H, chunks, D, Dv], what tokens read, Z [B, N, H, R, Dv], and the
    last state LAST [B, H, D, Dv] from FIRST; one program per head and BV channels of values. Arguments as in
    `delta_rule_solve`.
    """
    bh, block = tl.program_id(0).to(tl.int64), tl.program_id(1) * BV
    bn, h = bh // heads * N, bh % heads
    tiles: tl.constexpr = (D + BD - 1) // BD
    state = ()
    for j in tl.static_range(tiles):  # transposed, [BV, BD] each
        tile = load_state(FIRST + bh * D * DV, j * BD, block, D, DV, BD, BV)
        state = state + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    chunks = tl.cdiv(N, C)
    for step in range(chunks):
        c = chunks - 1 - step if REVERSE else step
        one, all_ranks = tokens_of(c * C, C, 1, REVERSE), tokens_of(c * C, C, RP, REVERSE)
        v, z = load_rows(V, one, bn, h, heads, N, DV, 1, 1, block, BV), tl.zeros([C * RP, BV], tl.float32)
        if R > 0:
            z = load_rows(U, all_ranks, bn, h, heads, N, DV, R, RP, block, BV)
        for j in tl.static_range(tiles):
            store_state(STATES + (bh * chunks + c) * D * DV, state[j], j * BD, block, D, DV)
            if R > 0:
                z = product(load_rows(W, all_ranks, bn, h, heads, N, D, R, RP, j * BD, BD), tl.trans(state[j]), z)
        if R > 0:
            store_rows(Z, z, all_ranks, bn, h, heads, N, DV, R, RP, block)
        after = ()
        for j in tl.static_range(tiles):
            gi, g, _, total = decays_of(F, one, bn, h, heads, N, D, FD, 1, C, j * BD, BD, LEAST)
            if not REVERSE:
                g = gi
            k = load_rows(K, one, bn, h, heads, N, D, 1, 1, j * BD, BD) * tl.exp(total[None, :] - g)
            new = product(tl.trans(v), k, state[j] * tl.exp(total)[None, :])
            if R > 0:
                gr, _, _, _ = decays_of(F, all_ranks, bn, h, heads, N, D, FD, RP, C, j * BD, BD, LEAST)
                a = load_rows(A, all_ranks, bn, h, heads, N, D, R, RP, j * BD, BD) * tl.exp(total[None, :] - gr)
                new = product(tl.trans(z), -a, new)
            after = after + (new,)  # type: ignore[assignment]  # noqa: RUF005
        state = after
    for j in tl.static_range(tiles):
        store_state(LAST + bh * D * DV, state[j], j * BD, block, D, DV)


@triton.jit(do_not_specialize=["N", "heads"])
def delta_rule_read(
    Q, K, V, F, A, Z, STATES, O, N, heads, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    FD: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, C: tl.constexpr, LEAST: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Compute O [B, N, H, Dv]; one program per head, chunk of C tokens and BV channels of values. Arguments as in
    `delta_rule_walk`, Q [B, N, H, D]."""
    bh, c, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BV
    bn, h = bh // heads * N, bh % heads
    one, all_ranks = tokens_of(c * C, C, 1, REVERSE), tokens_of(c * C, C, RP, REVERSE)
    i, ir = tl.arange(0, C), tl.arange(0, C * RP) // RP
    qk, qa = tl.zeros([C, C], tl.float32), tl.zeros([C, C * RP], tl.float32)
    o = tl.zeros([C, BV], tl.float32)
    STATES += (bh * tl.num_programs(1) + c) * D * DV
    for j in range((D + BD - 1) // BD):
        gi, g, m, _ = decays_of(F, one, bn, h, heads, N, D, FD, 1, C, j * BD, BD, LEAST)
        if not REVERSE:
            g = gi
        q = load_rows(Q, one, bn, h, heads, N, D, 1, 1, j * BD, BD)
        state = load_state(STATES, j * BD, block, D, DV, BD, BV)
        o = product(q * tl.exp(g), tl.trans(state), o)
        far = q * tl.exp(g - m[None, :])
        near = load_rows(K, one, bn, h, heads, N, D, 1, 1, j * BD, BD) * tl.exp(m[None, :] - g)
        qk = product(far, tl.trans(near), qk)
        if R > 0:
            gr, _, _, _ = decays_of(F, all_ranks, bn, h, heads, N, D, FD, RP, C, j * BD, BD, LEAST)
            erased = load_rows(A, all_ranks, bn, h, heads, N, D, R, RP, j * BD, BD) * tl.exp(m[None, :] - gr)
            qa = product(far, tl.trans(erased), qa)
    v = load_rows(V, one, bn, h, heads, N, DV, 1, 1, block, BV)
    o = product(tl.where(i[:, None] >= i[None, :], qk, 0.0), v, o)
    if R > 0:
        qa = tl.where((i[:, None] > ir[None, :]) if REVERSE else (i[:, None] >= ir[None, :]), -qa, 0.0)
        o = product(qa, load_rows(Z, all_ranks, bn, h, heads, N, DV, R, RP, block, BV), o)
    store_rows(O, o, one, bn, h, heads, N, DV, 1, 1, block)
