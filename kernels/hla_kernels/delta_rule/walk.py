"""Kernel of the delta rule: a walk over chunks of 16 tokens with a block of the state in registers.

Equations as in `chunked`, with gi and ge counted from the start of a chunk. Scores <x_i, y_j> are products of
x exp(g - m) and y exp(m - gi), m the sum of log_f over the first half of the chunk: with log_f of at least `LEAST` both
stay in the range of float32. The triangular system has (I + M)^-1 = (I - M)(I + M^2)(I + M^4)(I + M^8), since M^16 = 0.

Tiles have at most 32 rows, for which Triton's products take a computed first operand (see `hla.stages.tiles`).
"""

import triton
import triton.language as tl


@triton.jit
def rows_of(ptr, first, bn, h, heads, N, W: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, C: tl.constexpr, start,
            BLOCK: tl.constexpr):  # fmt: skip
    """Load C tokens of [B, N, H, R, W] as [C RP, BLOCK] in float32, the rank fastest; channels from `start` on."""
    i, d = tl.arange(0, C * RP), start + tl.arange(0, BLOCK)
    token, rank = first + i // RP, i % RP
    row = ((bn + token) * heads + h) * R + rank
    exists = ((token < N) & (rank < R))[:, None] & (d < W)[None, :]
    return tl.load(ptr + row[:, None] * W + d[None, :], exists, other=0.0).to(tl.float32)


@triton.jit
def decays_of(F, first, bn, h, heads, N, D: tl.constexpr, FD: tl.constexpr, RP: tl.constexpr, C: tl.constexpr, start,
              BLOCK: tl.constexpr, LEAST: tl.constexpr):  # fmt: skip
    """Return (gi, ge, m, their sum over the chunk): [C RP, BLOCK] twice, [BLOCK] twice."""
    i, d = tl.arange(0, C * RP), start + tl.arange(0, BLOCK)
    token = first + i // RP
    place = ((bn + token) * heads + h)[:, None] * FD + (d if FD > 1 else d * 0)[None, :]
    f = tl.load(F + place, (token < N)[:, None] & (d < D)[None, :], other=0.0)
    f = tl.maximum(f, LEAST)
    once = tl.where((i % RP == 0)[:, None], f, 0.0)
    gi = tl.cumsum(once, 0)
    middle = tl.sum(tl.where((i // RP < C // 2)[:, None], once, 0.0), 0)
    return gi, gi - f, middle, tl.sum(once, 0)


@triton.jit
def rounded(x):
    """Round to the nearest number of TF32. Tensor cores cut off the last 13 bits, so that states would shrink."""
    return (x.to(tl.int32, bitcast=True) + 4096).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, acc):
    """Return acc + a b, in TF32."""
    return tl.dot(rounded(a), rounded(b), acc, input_precision="tf32")


@triton.jit(do_not_specialize=["N", "heads"])
def walk(
    Q, K, V, F, A, B, FIRST, O, LAST, Z, STATES, N, heads, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, FD: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, C: tl.constexpr, LEAST: tl.constexpr,
    SAVE: tl.constexpr,
):  # fmt: skip
    """Compute O [B, N, H, Dv] and LAST [B, H, D, Dv] from FIRST, and with SAVE what every token reads, Z
    [B, N, H, R, Dv], and the states at the start of all chunks, STATES [B, H, chunks, D, Dv].

    Q, K [B, N, H, D], V [B, N, H, Dv], F [B, N, H, FD], A, B [B, N, H, R, D], contiguous. BV: channels of values per
    program; BD: channels per tile, so that tiles fit into registers; RP: R, padded to a power of two.
    """
    bh, block = tl.program_id(0).to(tl.int64), tl.program_id(1) * BV
    bn, h = bh // heads * N, bh % heads
    d, e, i, ir = tl.arange(0, BD), block + tl.arange(0, BV), tl.arange(0, C), tl.arange(0, C * RP)
    token = ir // RP
    tiles: tl.constexpr = (D + BD - 1) // BD
    state = ()
    for j in tl.static_range(tiles):  # transposed, [BV, BD] each
        place, exists = (j * BD + d)[None, :] * DV + e[:, None], (j * BD + d < D)[None, :] & (e < DV)[:, None]
        one = tl.load(FIRST + bh * D * DV + place, exists, other=0.0)
        state = state + (one,)  # type: ignore[assignment]  # noqa: RUF005
    chunks = tl.cdiv(N, C)
    for c in range(chunks):
        first = c * C
        qk, o = tl.zeros([C, C], tl.float32), tl.zeros([C, BV], tl.float32)
        bk, ba = tl.zeros([C * RP, C], tl.float32), tl.zeros([C * RP, C * RP], tl.float32)
        qa, z = tl.zeros([C, C * RP], tl.float32), tl.zeros([C * RP, BV], tl.float32)
        for j in tl.static_range(tiles):
            one = state[j]
            if SAVE:
                place, exists = (j * BD + d)[None, :] * DV + e[:, None], (j * BD + d < D)[None, :] & (e < DV)[:, None]
                tl.store(STATES + (bh * chunks + c) * D * DV + place, one, exists)
            gi, _, m, total = decays_of(F, first, bn, h, heads, N, D, FD, 1, C, j * BD, BD, LEAST)
            q = rows_of(Q, first, bn, h, heads, N, D, 1, 1, C, j * BD, BD)
            o = product(q * tl.exp(gi), tl.trans(one), o)
            far = q * tl.exp(gi - m[None, :])
            near = rows_of(K, first, bn, h, heads, N, D, 1, 1, C, j * BD, BD) * tl.exp(m[None, :] - gi)
            qk = product(far, tl.trans(near), qk)
            if R > 0:
                gr, ge, m, total = decays_of(F, first, bn, h, heads, N, D, FD, RP, C, j * BD, BD, LEAST)
                b = rows_of(B, first, bn, h, heads, N, D, R, RP, C, j * BD, BD)
                z = product(b * tl.exp(ge), tl.trans(one), z)
                reading = b * tl.exp(ge - m[None, :])
                bk = product(reading, tl.trans(near), bk)
                erased = rows_of(A, first, bn, h, heads, N, D, R, RP, C, j * BD, BD) * tl.exp(m[None, :] - gr)
                ba = product(reading, tl.trans(erased), ba)
                qa = product(far, tl.trans(erased), qa)
        v = rows_of(V, first, bn, h, heads, N, DV, 1, 1, C, block, BV)
        o = product(tl.where(i[:, None] >= i[None, :], qk, 0.0), v, o)
        if R > 0:
            z = product(tl.where(token[:, None] > i[None, :], bk, 0.0), v, z)
            m1 = tl.where(token[:, None] > token[None, :], ba, 0.0)
            nothing = tl.zeros([C * RP, C * RP], tl.float32)
            m2 = product(m1, m1, nothing)
            m4 = product(m2, m2, nothing)
            z = product(product(m4, m4, nothing), z, z)
            z = product(m4, z, z)
            z = product(m2, z, z)
            z = product(-m1, z, z)
            o = product(tl.where(i[:, None] >= token[None, :], -qa, 0.0), z, o)
            if SAVE:
                row = ((bn + first + token) * heads + h) * R + ir % RP
                kept = ((first + token < N) & (ir % RP < R))[:, None] & (e < DV)[None, :]
                tl.store(Z + row[:, None] * DV + e[None, :], z, kept)
        after = ()
        for j in tl.static_range(tiles):
            gi, _, m, total = decays_of(F, first, bn, h, heads, N, D, FD, 1, C, j * BD, BD, LEAST)
            k = rows_of(K, first, bn, h, heads, N, D, 1, 1, C, j * BD, BD)
            one = product(tl.trans(v), k * tl.exp(total[None, :] - gi), state[j] * tl.exp(total)[None, :])
            if R > 0:
                gr, ge, m, total = decays_of(F, first, bn, h, heads, N, D, FD, RP, C, j * BD, BD, LEAST)
                a = rows_of(A, first, bn, h, heads, N, D, R, RP, C, j * BD, BD)
                one = product(tl.trans(z), -a * tl.exp(total[None, :] - gr), one)
            after = after + (one,)  # type: ignore[assignment]  # noqa: RUF005
        state = after
        row = (bn + first + i) * heads + h
        kept = (first + i < N)[:, None] & (e < DV)[None, :]
        tl.store(O + row[:, None] * DV + e[None, :], o.to(O.dtype.element_ty), kept)
    for j in tl.static_range(tiles):
        place, exists = (j * BD + d)[None, :] * DV + e[:, None], (j * BD + d < D)[None, :] & (e < DV)[:, None]
        tl.store(LAST + bh * D * DV + place, state[j], exists)
