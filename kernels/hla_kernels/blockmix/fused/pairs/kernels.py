"""Kernels of token pairs: output, dq with the gradient of the mixing matrix, dk with dv.

Each program holds one tile of tokens and loops over all others.
"""

import triton
import triton.language as tl

from ....hla.fused.maps import phi_grad
from ....hla.fused.tiles import load_rows, store_rows, zero_rows
from ..features import features
from ..geometry import at_head, keep_of, scale_of
from ..tokens import times
from .tiles import add_rows, add_weighted, load_features, mixed_at, of_blocks, products, scores, tokens_at

NO_SPECIALIZE = ["qs", "ks", "vs", "os", "gs", "dqs", "dks", "dvs", "ms", "GEO", "N", "H", "BH", "M", "G", "count",
                 "scale", "eps"]  # fmt: skip


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def number_blocks(ids, GEO, N, BN: tl.constexpr):
    """Store the block of each token in ids [N]; GEO as in `geometry`."""
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    prefix, t, h, w, mt, mh, mw = GEO
    c = tl.maximum(i - prefix, 0)
    line = c // w
    it = ((line // h + 1) * mt - 1) // t
    ih = ((line % h + 1) * mh - 1) // h
    iw = ((c % w + 1) * mw - 1) // w
    block = (it * mh + ih) * mw + iw + (prefix > 0).to(tl.int32)
    tl.store(ids + i, tl.where(i < prefix, 0, block), mask=i < N)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def pair_outputs(
    q, k, v, o, m, ids, keep, scales, qs, ks, vs, os, ms, N, H, G, count, scale, eps, NORM: tl.constexpr,
    FMAP: tl.constexpr, DIGITS: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr,
    DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, PREC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute o of a tile of queries."""
    bh = tl.program_id(0) // count
    q = at_head(q, qs, bh, H, 1, ALIGN)
    k = at_head(k, ks, bh, H, G, ALIGN)
    v = at_head(v, vs, bh, H, G, ALIGN)
    o = at_head(o, os, bh, H, 1, ALIGN)
    keep = keep_of(keep, bh, H, N)
    m += (bh % H) * ms[0]
    s = scale_of(scales, scale, bh, H)
    i, live = tokens_at(keep, tl.program_id(0) % count * BM, N, BM)
    fq = load_features(q, i, qs[1] * ALIGN, live, FMAP, DIGITS, D, F1, F2)
    rows = tl.load(ids + i, mask=i < N, other=0)[:, None]
    acc = zero_rows(BM, V1, V2)
    den = tl.zeros([BM], tl.float32)
    for start in range(0, N, BN):
        j, there = tokens_at(keep, start, N, BN)
        fk = load_features(k, j, ks[1] * ALIGN, there, FMAP, DIGITS, D, F1, F2)
        tv = load_rows(v, j.to(tl.int64), vs[1] * ALIGN, there, DV, V1, V2, False)
        columns = tl.load(ids + j, mask=j < N, other=0)[None, :]
        w = scores(fq, fk, DIGITS, F2, PREC) * mixed_at(m, rows, columns, ms)
        if NORM:
            den += tl.sum(w, 1)
        acc = add_rows(acc, w.to(tv[0].dtype), tv, V2, PREC)
    factor = tl.full([BM], 1.0, tl.float32) * s
    if NORM:
        factor = s / tl.where(live, den * s + eps, 1.0)
    store_rows(o, i.to(tl.int64), os[1] * ALIGN, live, times(acc, factor[:, None], V2), DV, V1, V2)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def pair_query_grads(
    q, k, v, g, dq, m, ids, keep, scales, ratios, parts, qs, ks, vs, gs, dqs, ms, N, H, BH, M, G, count, scale, eps,
    NORM: tl.constexpr, FMAP: tl.constexpr, DIGITS: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, PREC: tl.constexpr,
    MP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute dq of a tile of queries; r and r sum_l w_il do_i.v_l per query in ratios [2, B * H, N]; and the tile's
    part of the gradient of m in parts [H, B, count, M, M]."""
    bh = tl.program_id(0) // count
    tile = tl.program_id(0) % count
    q = at_head(q, qs, bh, H, 1, ALIGN)
    k = at_head(k, ks, bh, H, G, ALIGN)
    v = at_head(v, vs, bh, H, G, ALIGN)
    g = at_head(g, gs, bh, H, 1, ALIGN)
    dq = at_head(dq, dqs, bh, H, 1, ALIGN)
    keep = keep_of(keep, bh, H, N)
    m += (bh % H) * ms[0]
    s = scale_of(scales, scale, bh, H)
    i, live = tokens_at(keep, tile * BM, N, BM)
    fq = load_features(q, i, qs[1] * ALIGN, live, FMAP, DIGITS, D, F1, F2)
    tg = load_rows(g, i.to(tl.int64), gs[1] * ALIGN, live, DV, V1, V2, False)
    own = tl.load(ids + i, mask=i < N, other=0)
    inverse = tl.full([BM], 1.0, tl.float32)
    mean = tl.zeros([BM], tl.float32)
    if NORM:
        den = tl.zeros([BM], tl.float32)
        for start in range(0, N, BN):
            j, there = tokens_at(keep, start, N, BN)
            fk = load_features(k, j, ks[1] * ALIGN, there, FMAP, DIGITS, D, F1, F2)
            tv = load_rows(v, j.to(tl.int64), vs[1] * ALIGN, there, DV, V1, V2, False)
            columns = tl.load(ids + j, mask=j < N, other=0)[None, :]
            w = scores(fq, fk, DIGITS, F2, PREC) * mixed_at(m, own[:, None], columns, ms)
            den += tl.sum(w, 1)
            mean += tl.sum(w * products(tg, tv, V2, PREC), 1)
        inverse = 1.0 / tl.where(live, den * s + eps, 1.0)
        mean = mean * s * inverse
        at = ratios + bh.to(tl.int64) * N + i
        tl.store(at, inverse, mask=live)
        tl.store(at + BH.to(tl.int64) * N, mean, mask=live)
    factor = (inverse * s)[:, None]
    acc = zero_rows(BM, F1, F2)
    dm = tl.zeros([BM, MP], tl.float32)
    for start in range(0, N, BN):
        j, there = tokens_at(keep, start, N, BN)
        fk = load_features(k, j, ks[1] * ALIGN, there, FMAP, DIGITS, D, F1, F2)
        tv = load_rows(v, j.to(tl.int64), vs[1] * ALIGN, there, DV, V1, V2, False)
        columns = tl.load(ids + j, mask=j < N, other=0)
        e = (products(tg, tv, V2, PREC) - mean[:, None]) * factor
        own_e = (scores(fq, fk, DIGITS, F2, PREC) * e).to(tv[0].dtype)
        dm = tl.dot(own_e, of_blocks(columns, there, MP).to(tv[0].dtype), dm, input_precision=PREC)
        acc = add_weighted(acc, e * mixed_at(m, own[:, None], columns[None, :], ms), fk, DIGITS, F2, PREC)
    raw = load_rows(q, i.to(tl.int64), qs[1] * ALIGN, live, D, F1, F2, False)
    f, _ = features(raw, None, None, i, live, 1, FMAP, 0, D, F1, F2)
    store_rows(dq, i.to(tl.int64), dqs[1] * ALIGN, live, phi_grad(f, acc, FMAP, F2), D, F1, F2)
    mine = tl.trans(of_blocks(own, live, MP)).to(tl.float32)
    part = tl.dot(mine, tl.where(live[:, None], dm, 0.0), input_precision=PREC)
    a = tl.arange(0, MP)
    parts += (((bh % H) * (BH // H) + bh // H).to(tl.int64) * count + tile) * M * M
    inside = (a < M)[:, None] & (a < M)[None, :]
    tl.store(parts + a[:, None] * M + a[None, :], part, mask=inside)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def pair_key_grads(
    q, k, v, g, dk, dv, m, ids, keep, scales, ratios, qs, ks, vs, gs, dks, dvs, ms, N, H, BH, G, count, scale,
    NORM: tl.constexpr, FMAP: tl.constexpr, DIGITS: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, PREC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a tile of keys for one query head."""
    bh = tl.program_id(0) // count
    q = at_head(q, qs, bh, H, 1, ALIGN)
    k = at_head(k, ks, bh, H, G, ALIGN)
    v = at_head(v, vs, bh, H, G, ALIGN)
    g = at_head(g, gs, bh, H, 1, ALIGN)
    dk = at_head(dk, dks, bh, H, 1, ALIGN)
    dv = at_head(dv, dvs, bh, H, 1, ALIGN)
    keep = keep_of(keep, bh, H, N)
    m += (bh % H) * ms[0]
    s = scale_of(scales, scale, bh, H)
    j, there = tokens_at(keep, tl.program_id(0) % count * BN, N, BN)
    fk = load_features(k, j, ks[1] * ALIGN, there, FMAP, DIGITS, D, F1, F2)
    tv = load_rows(v, j.to(tl.int64), vs[1] * ALIGN, there, DV, V1, V2, False)
    columns = tl.load(ids + j, mask=j < N, other=0)[:, None]
    acc_k, acc_v = zero_rows(BN, F1, F2), zero_rows(BN, V1, V2)
    if NORM:
        ratios += bh.to(tl.int64) * N
    for start in range(0, N, BM):
        i, live = tokens_at(keep, start, N, BM)
        fq = load_features(q, i, qs[1] * ALIGN, live, FMAP, DIGITS, D, F1, F2)
        tg = load_rows(g, i.to(tl.int64), gs[1] * ALIGN, live, DV, V1, V2, False)
        rows = tl.load(ids + i, mask=i < N, other=0)[None, :]
        u = products(tv, tg, V2, PREC)
        mixed = mixed_at(m, rows, columns, ms)
        if NORM:
            u -= tl.load(ratios + BH.to(tl.int64) * N + i, mask=live, other=0.0)[None, :]
            mixed *= tl.load(ratios + i, mask=live, other=0.0)[None, :]
        acc_v = add_rows(acc_v, (scores(fk, fq, DIGITS, F2, PREC) * mixed).to(tg[0].dtype), tg, V2, PREC)
        acc_k = add_weighted(acc_k, u * mixed, fq, DIGITS, F2, PREC)
    raw = load_rows(k, j.to(tl.int64), ks[1] * ALIGN, there, D, F1, F2, False)
    f, _ = features(raw, None, None, j, there, 1, FMAP, 0, D, F1, F2)
    gk = phi_grad(f, times(acc_k, s, F2), FMAP, F2)
    store_rows(dk, j.to(tl.int64), dks[1] * ALIGN, there, gk, D, F1, F2)
    store_rows(dv, j.to(tl.int64), dvs[1] * ALIGN, there, times(acc_v, s, V2), DV, V1, V2)
