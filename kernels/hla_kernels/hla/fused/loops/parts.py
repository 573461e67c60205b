"""Sums over the parts of a head in a fixed order, without atomics: deterministic."""

import triton
import triton.language as tl

from ..algebra import has
from .extent import means

NO_SPECIALIZE = ["N", "PARTS", "heads", "scale", "ridge", "n"]


@triton.jit
def combine_section(
    parts, out, step, PARTS, block, scale, n, ridge, START: tl.constexpr, LEN: tl.constexpr, COLS: tl.constexpr,
    OA: tl.constexpr, OB: tl.constexpr, CENTRED: tl.constexpr, RIDGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[e] = scale (sum over parts - sum a[i] sum b[j] / n) + ridge [i = j] for BLOCK elements e = i COLS + j of a
    section."""
    e = block * BLOCK + tl.arange(0, BLOCK)
    live = e < LEN
    total = tl.zeros([BLOCK], tl.float32)
    a = tl.zeros([BLOCK], tl.float32)
    b = tl.zeros([BLOCK], tl.float32)
    for part in range(PARTS):
        p = parts + (tl.full([], 0, tl.int64) + part) * step
        total += tl.load(p + START + e, mask=live, other=0.0)
        if CENTRED:
            a += tl.load(p + OA + e // COLS, mask=live, other=0.0)
            b += tl.load(p + OB + e % COLS, mask=live, other=0.0)
    if CENTRED:
        total -= a * b / n
    total *= scale
    if RIDGE:
        total += tl.where(e // COLS == e % COLS, ridge, 0.0)
    tl.store(out + START + e, total, mask=live)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def hla_combine(
    parts, state, PARTS, heads, scale, n, ridge, ORDER: tl.constexpr, ONES: tl.constexpr, CENTER: tl.constexpr,
    RIDGE: tl.constexpr, SUMS: tl.constexpr, L: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the parts [PARTS, B * H, K] of `hla_reduce_moments` in order; scale, centre and ridge the moments."""
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    n, scale = means(n, head, scale)
    p = parts + head * L.K
    o = state + head * L.K
    step = heads.to(tl.int64) * L.K
    FF: tl.constexpr = L.fd * L.fd
    FV: tl.constexpr = L.fd * L.dv
    KEY: tl.constexpr = CENTER is not None
    BOTH: tl.constexpr = CENTER == "qk"
    if has("P", ORDER):
        combine_section(
            p, o, step, PARTS, block, scale, n, ridge, L.P, FV, L.dv, L.SUM_K, L.SUM_V, KEY or ONES, False, BLOCK
        )
    if has("S", ORDER):
        combine_section(p, o, step, PARTS, block, scale, n, ridge, L.S, FF, L.fd, L.SUM_K, L.SUM_K, KEY, RIDGE, BLOCK)
    if has("C", ORDER):
        combine_section(
            p, o, step, PARTS, block, scale, n, ridge, L.C, FV, L.dv, L.SUM_Q, L.SUM_V, BOTH or ONES, False, BLOCK
        )
    if has("R", ORDER):
        combine_section(p, o, step, PARTS, block, scale, n, ridge, L.R, FF, L.fd, L.SUM_K, L.SUM_Q, KEY, RIDGE, BLOCK)
    if has("W", ORDER):
        combine_section(p, o, step, PARTS, block, scale, n, ridge, L.W, FF, L.fd, L.SUM_Q, L.SUM_Q, BOTH, False, BLOCK)
    if SUMS:
        combine_section(p, o, step, PARTS, block, 1.0, n, ridge, L.SUM_Q, 2 * L.fd + L.dv, 1, 0, 0, False, False, BLOCK)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def hla_add_parts(
    parts, out, PARTS, heads, LEN: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute out [B * H, K], the sum over parts, in order, of the first LEN elements of parts [PARTS, B * H, K]."""
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    combine_section(
        parts + head * K, out + head * K, heads.to(tl.int64) * K, PARTS, block, 1.0, 1.0, 0.0, 0, LEN, 1, 0, 0, False,
        False, BLOCK,
    )  # fmt: skip
