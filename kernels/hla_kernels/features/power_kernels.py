"""Kernels of `power_pair`: one launch and one pass over memory per direction, for q and k together.

Per channel they take one logarithm, one power of two and no division: y^(p - 1) gives y^p and its derivative.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch.recording import launch
from ..hla.fused.loops.settle import INTERPRETED
from ..hla.fused.spec import placed
from .row_tiles import grid, inner, part, rows_of, starts

TINY = tl.constexpr(1.1754943508222875e-38)  # smallest normal number of float32
LOWEST = tl.constexpr(-1e30)  # in place of the logarithm of 0
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def joined(parts, part):
    """Return a longer tuple."""
    return parts + (part,)  # noqa: RUF005, which Triton does not compile


@triton.jit
def loaded(X, start, keep, D: tl.constexpr, W: tl.constexpr):
    """Return rows as a tuple of float32 parts [BT, W]."""
    parts = ()
    for i in tl.static_range(0, D, W):
        place, inside = part(start, keep, i, D, W)
        parts = joined(parts, tl.load(X + place, mask=inside, other=0.0).to(tl.float32))
    return parts


@triton.jit
def fast_log2(x):
    """Return log2 x with an absolute error of 2^-22 for x in [0.5, 2], else a relative one; `tl.log2` takes 20
    instructions instead of one."""
    if INTERPRETED:
        log = tl.log2(x)
    else:
        code: tl.constexpr = "lg2.approx.ftz.f32 $0, $1;"
        log = tl.inline_asm_elementwise(code, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return log


@triton.jit
def power_rows(
    G, X, exponent, OUT, DP, g_at, at, tile, N, H: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """Store |y| y^p / |y^p| of a tile, or with G, their gradients, dx of a tile and dp of each of its rows."""
    row, place, keep = rows_of(tile, N, H, BT)
    xs = loaded(X, starts(at, row, ALIGN), keep, D, W)
    gs = xs
    if G is not None:
        gs = loaded(G, starts(g_at, row, ALIGN), keep, D, W)
    top = xs[0]
    for i in tl.static_range(1, len(xs)):
        top = tl.maximum(top, xs[i])
    top = tl.maximum(tl.max(top, 1), TINY)
    inverse, p = (1.0 / top)[:, None], tl.load(exponent + row[2]).to(tl.float32)
    less = tl.maximum(p - 1.0, 1e-20)[:, None]  # 0^0 would be 1
    zz = tl.zeros([BT, W], tl.float32)
    ww = tl.zeros([BT, W], tl.float32)
    gw = tl.zeros([BT, W], tl.float32)
    zs = ()
    logs = ()
    vs = ()
    kept = ()
    for i in tl.static_range(len(xs)):
        z = tl.maximum(xs[i], 0.0, propagate_nan=tl.PropagateNan.ALL) * inverse  # y / max y
        log = tl.maximum(fast_log2(z), LOWEST)
        v = tl.exp2(less * log)
        w = z * v  # z^p
        zz += z * z
        ww += w * w
        g = tl.where(w > 0.0, gs[i], 0.0)  # see `power_torch`
        gw += g * w
        zs = joined(zs, z)
        logs = joined(logs, log)
        vs = joined(vs, v)
        kept = joined(kept, g)
    zz, ww = tl.sum(zz, 1), tl.sum(ww, 1)
    short, unit = tl.rsqrt(tl.maximum(zz, TINY)), tl.rsqrt(tl.maximum(ww, TINY))  # u = unit w
    length = zz * short  # of z
    along = unit * tl.sum(gw, 1)  # g . u
    of_z, of_v, of_w = (along * short)[:, None], (p * length * unit)[:, None], (along * unit)[:, None]
    of_y = (top * (length * unit))[:, None]
    dp = tl.zeros([BT, W], tl.float32)
    for i in tl.static_range(len(xs)):
        w = zs[i] * vs[i]
        out = w * of_y
        if G is not None:
            across = kept[i] - of_w * w
            dp += w * across * logs[i]
            out = of_z * zs[i] + of_v * (vs[i] * across)
        to, inside = part(place * D, keep, i * W, D, W)
        tl.store(OUT + to, out.to(OUT.dtype.element_ty), mask=inside)
    if G is not None:
        tl.store(DP + place, tl.sum(dp * of_y, 1) * LN_2, mask=keep)


@triton.jit(do_not_specialize=["NQ", "NK", "TILES"])
def power_tiles(
    GQ, GK, Q, K, PQ, PK, OUTQ, OUTK, DPQ, DPK, gq_at, gk_at, q_at, k_at, NQ, NK, TILES, HQ: tl.constexpr,
    HK: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """`power_rows` of a tile of q, or behind TILES of them, of k."""
    tile = tl.program_id(0)
    if tile < TILES:
        power_rows(GQ, Q, PQ, OUTQ, DPQ, gq_at, q_at, tile, NQ, HQ, ALIGN, D, W, BT)
    else:
        power_rows(GK, K, PK, OUTK, DPK, gk_at, k_at, tile - TILES, NK, HK, ALIGN, D, W, BT)


Pair = tuple[Tensor, Tensor]


def forward(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor) -> Pair:
    """Return the features of q [B, N, H, D] and k with exponents of_q [H] and of_k."""
    return _launch((inner(q), inner(k)), (of_q, of_k), None, (None, None))


def backward(grads: Pair, q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and of their exponents."""
    of_rows = [torch.empty(x.shape[:3], dtype=torch.float32, device=x.device) for x in (q, k)]
    dq, dk = _launch((inner(q), inner(k)), (of_q, of_k), (inner(grads[0]), inner(grads[1])), of_rows)
    return dq, dk, of_rows[0].sum((0, 1)).to(of_q.dtype), of_rows[1].sum((0, 1)).to(of_k.dtype)


def _launch(pair: Pair, exponents: Pair, grads: Pair | None, of_rows: Sequence[Tensor | None]) -> Pair:
    q, k = pair
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(k.shape, dtype=k.dtype, device=k.device)
    at, units = placed(*(grads or pair), *pair)
    (of_q, sizes), (of_k, _) = (grid(x, grads is not None) for x in pair)
    if of_q + of_k:
        with torch.cuda.device_of(q):
            launch(
                power_tiles, of_q + of_k, *(grads or (None, None)), *pair, *exponents, *out, *of_rows,
                *at, q.shape[1], k.shape[1], of_q, HQ=q.shape[2], HK=k.shape[2], ALIGN=units, **sizes,
            )  # fmt: skip
    return out
