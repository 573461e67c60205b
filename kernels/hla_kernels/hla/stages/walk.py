"""One launch for all stages of ahla, hla2 and hla3, without a backward: one walk over chunks of tokens.

A program has one head and a block of values. It holds all states of the operator in registers: the inner stages' (S, P)
and the last stage's. It reads a chunk of tokens while it computes the one before, and writes outputs alone.

Chunks and blocks are shorter than 64: products with a computed first operand have fewer than 64 rows, which Triton
compiles to instructions for one warp. Products of more rows use four warps; their first operands are loaded (see
`tiles`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.recording import launch
from ..fused.spec import padded
from .kernels import get_state, put_state
from .operator import state_size
from .plan import WALK_BLOCK, walk_chunk
from .tiles import log2_of, powers, product, rows_of, tile, weighted


@triton.jit
def read(x, state, power, DECAY: tl.constexpr):
    """Return x times a state, which is cut into the sum of two bfloat16 numbers; power: decay of the rows."""
    high = (state.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    y = product(x, high.to(x.dtype), tl.zeros([x.shape[0], state.shape[1]], tl.float32), False)
    y = product(x, (state - high).to(x.dtype), y, False)
    return y * power[:, None] if DECAY else y


@triton.jit
def gained(state, y, z, power, kept, dtype: tl.constexpr, DECAY: tl.constexpr):
    """Return a state after a chunk, plus y'z; power: decay of z until the end of the chunk."""
    if DECAY:
        z = z.to(tl.float32) * power[:, None]
        state = state * kept
    return product(tl.trans(y), z.to(dtype), state, False)


@triton.jit
def tokens_at(
    qp, kp, vp, row, N, first, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, BZ: tl.constexpr
):  # fmt: skip
    """Load rows of queries, keys and a block of values."""
    inside = row < N
    return tile(qp, row, inside, 0, D, DP), tile(kp, row, inside, 0, D, DP), tile(vp, row, inside, first, DV, BZ)


@triton.jit(do_not_specialize=["at", "sizes", "scale"])
def causal_walk(
    Q, K, V, LOG2, FIRST, LAST, OUT, at, sizes, scale, OP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    SIZE: tl.constexpr, DP: tl.constexpr, BZ: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute OUT [B, N, H, Dv], and LAST [B H, SIZE], the states after the tokens, from FIRST, the ones before them;
    both may be None. sizes: N, heads."""
    DECAY: tl.constexpr = LOG2 is not None
    BLOCKS: tl.constexpr = (DV + BZ - 1) // BZ
    KEYS: tl.constexpr = OP != "ahla"  # u = LA(q, k, k) with the state S
    VALUES: tl.constexpr = OP != "hla2"  # r = LA(q, k, v) with the state P
    DTYPE: tl.constexpr = OUT.dtype.element_ty
    N, heads = sizes[0], sizes[1]
    bh, first = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * BZ
    b, h = bh // heads, bh % heads
    log2 = log2_of(LOG2, h)
    qp, kp, vp = rows_of(Q, at, 0, b, h), rows_of(K, at, 1, b, h), rows_of(V, at, 2, b, h)
    i, e = tl.arange(0, C), first + tl.arange(0, BZ)
    p_at: tl.constexpr = D * D if KEYS else 0
    last_at: tl.constexpr = SIZE - D * DV
    s, p, last = tl.zeros([DP, DP], tl.float32), tl.zeros([DP, BZ], tl.float32), tl.zeros([DP, BZ], tl.float32)
    if FIRST is not None:
        FIRST += bh.to(tl.int64) * SIZE
        if KEYS:
            s, _ = get_state(FIRST, D, D, D, 1, 0, DP, DP, False)
        if VALUES:
            p, _ = get_state(FIRST + p_at, D, DV, DV, 1, first, DP, BZ, False)
        last, _ = get_state(FIRST + last_at, D, DV, DV, 1, first, DP, BZ, False)
    if KEYS:
        last = tl.trans(last)
    stride = heads.to(tl.int64) * DV
    OUT += b.to(tl.int64) * N * stride + h * DV
    following = tokens_at(qp, kp, vp, i, N, first, D, DV, DP, BZ)
    for c in range(tl.cdiv(N, C)):
        row = c * C + i
        n = tl.minimum(C, N - c * C)
        log2 += 0.0  # else the powers would stay in registers during the loop
        entering, leaving, kept = powers(log2, i + 1, DECAY), powers(log2, n - 1 - i, DECAY), powers(log2, n, DECAY)
        q, k, v = following
        if KEYS:  # the first product is wider than tall: else Triton would divide the few rows among warps, not columns
            y = read(q, s, entering, DECAY)
        if VALUES:
            z = read(q, p, entering, DECAY)
        following = tokens_at(qp, kp, vp, row + C, N, first, D, DV, DP, BZ)
        w = weighted(product(q, tl.trans(k), tl.zeros([C, C], tl.float32), False), log2, i, True, DECAY).to(DTYPE)
        if VALUES:
            z = product(w, v, z, False) * scale
            p = gained(p, k, v, leaving, kept, DTYPE, DECAY)
        else:
            z = v
        near = z.to(DTYPE)
        if KEYS:
            y = product(w, k, y, False) * scale
            s = gained(s, k, k, leaving, kept, DTYPE, DECAY)
            w = product(q, tl.trans(y.to(DTYPE)), tl.zeros([C, C], tl.float32), False)
            w = weighted(w, log2, i, True, DECAY).to(DTYPE)
        out = read(q, tl.trans(last) if KEYS else last, entering, DECAY)
        out = product(w, near, out, False) * scale
        if KEYS:
            last = gained(last, near, y, leaving, kept, DTYPE, DECAY)
        else:
            last = gained(last, k, z, leaving, kept, DTYPE, DECAY)
        place = row.to(tl.int64)[:, None] * stride + e[None, :]
        tl.store(OUT + place, out.to(DTYPE), (row < N)[:, None] & (e < DV)[None, :])
    if LAST is not None:
        LAST += bh.to(tl.int64) * SIZE
        if KEYS:
            last = tl.trans(last)
            if first == 0:
                put_state(LAST, (s, 0.0), D, D, D, 0, DP, DP, False)
        if VALUES:
            put_state(LAST + p_at, (p, 0.0), D, DV, DV, first, DP, BZ, False)
        put_state(LAST + last_at, (last, 0.0), D, DV, DV, first, DP, BZ, False)


def walked(
    op: str, q: Tensor, k: Tensor, v: Tensor, log2: Tensor | None, first: Tensor | None, scale: float, keep: bool
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return o [B, N, H, Dv], and the state after the tokens if `keep`, from features q, k and values.

    log2: of the decay per query head, or None; first: the state before the tokens; states as in `causal_stages`.
    """
    (b, n, h, d), dv = q.shape, v.shape[3]
    out, size, block = q.new_empty((b, n, h, dv)), state_size(op, d, dv), min(WALK_BLOCK, padded(dv))
    last = torch.empty((b, h, size), dtype=torch.float32, device=q.device) if keep else None
    at = tuple(y for x in (q, k, v) for y in (*(s // 8 for s in x.stride()[:3]), h // x.shape[2]))
    launch(
        causal_walk, b * h * -(-dv // block), q, k, v, log2, None if first is None else first.contiguous(), last, out,
        at, (n, h), scale, OP=op, D=d, DV=dv, SIZE=size, DP=padded(d), BZ=block, C=walk_chunk(d), num_warps=4,
        num_stages=1,
    )  # fmt: skip
    return out, last
