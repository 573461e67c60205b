"""Kernel of the gradients of the delta rule: products of the states of all tokens with rows of values.

S_t of a token in a chunk is not stored. With S the state at the start of the chunk, and gi and ge as in `chunked`,

    S_t w = exp(gi_t) S w + sum_{j <= t} exp(gi_t - gi_j) (k_j <v_j, w> - a_j <z_j, w>)

and for S_{t-1} w, which does not see token t, with ge_t for gi_t and j < t. Chunks are independent.
"""

import triton
import triton.language as tl

from .walk import decays_of, rows_of


@triton.jit
def added(a, b, acc):
    """Return acc + a b, as accurate as float32."""
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit(do_not_specialize=["N", "heads"])
def state_rows(
    STATES, K, V, F, A, Z, W, OUT, N, heads, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    FD: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, M: tl.constexpr, C: tl.constexpr, LEAST: tl.constexpr,
    STRICT: tl.constexpr,
):  # fmt: skip
    """Compute OUT [B, N, H, M, D] = S_t w, or S_{t-1} w if STRICT, for rows W [B, N, H, M, Dv]; one program per head,
    chunk of C tokens and row of a token.

    STATES [B, H, chunks, D, Dv], K [B, N, H, D], V [B, N, H, Dv], F [B, N, H, FD], A [B, N, H, R, D],
    Z [B, N, H, R, Dv], contiguous. BD, BV: channels per tile.
    """
    bh, c, m = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    bn, h, first = bh // heads * N, bh % heads, c * C
    i, d, e = tl.arange(0, C), tl.arange(0, BD), tl.arange(0, BV)
    token = tl.arange(0, C * RP) // RP
    W += m * DV
    of_k, of_a = tl.zeros([C, C], tl.float32), tl.zeros([C, C * RP], tl.float32)
    for j in range((DV + BV - 1) // BV):
        w = rows_of(W, first, bn, h, heads, N, DV, M, 1, C, j * BV, BV)
        of_k = added(w, tl.trans(rows_of(V, first, bn, h, heads, N, DV, 1, 1, C, j * BV, BV)), of_k)
        if R > 0:
            of_a = added(w, tl.trans(rows_of(Z, first, bn, h, heads, N, DV, R, RP, C, j * BV, BV)), of_a)
    seen, seen_a = i[:, None] >= i[None, :], i[:, None] >= token[None, :]
    if STRICT:
        seen, seen_a = i[:, None] > i[None, :], i[:, None] > token[None, :]
    of_k, of_a = tl.where(seen, of_k, 0.0), tl.where(seen_a, -of_a, 0.0)
    STATES += (bh * tl.num_programs(1) + c) * D * DV
    for j in range((D + BD - 1) // BD):
        gi, g, middle, _ = decays_of(F, first, bn, h, heads, N, D, FD, 1, C, j * BD, BD, LEAST)
        if not STRICT:
            g = gi
        k = rows_of(K, first, bn, h, heads, N, D, 1, 1, C, j * BD, BD) * tl.exp(middle[None, :] - gi)
        out = added(of_k, k, tl.zeros([C, BD], tl.float32))
        if R > 0:
            gr, _, _, _ = decays_of(F, first, bn, h, heads, N, D, FD, RP, C, j * BD, BD, LEAST)
            a = rows_of(A, first, bn, h, heads, N, D, R, RP, C, j * BD, BD) * tl.exp(middle[None, :] - gr)
            out = added(of_a, a, out)
        out *= tl.exp(g - middle[None, :])
        read = tl.zeros([C, BD], tl.float32)
        for jj in range((DV + BV - 1) // BV):
            exists = (j * BD + d < D)[None, :] & (jj * BV + e < DV)[:, None]
            state = tl.load(STATES + (j * BD + d)[None, :] * DV + (jj * BV + e)[:, None], exists, other=0.0)
            read = added(rows_of(W, first, bn, h, heads, N, DV, M, 1, C, jj * BV, BV), state, read)
        out += read * tl.exp(g)
        row = ((bn + first + i) * heads + h) * M + m
        exists = (first + i < N)[:, None] & (j * BD + d < D)[None, :]
        tl.store(OUT + row[:, None] * D + (j * BD + d)[None, :], out, exists)
