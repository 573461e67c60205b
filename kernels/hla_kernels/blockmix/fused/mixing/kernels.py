"""Mixing of block moments, X~_i = Sum_b m_ib X_b, and the gradient of the mixing matrix m.

X is [M, B * H, C] (C = V F for matrices, F for vectors), the layout of the moments, so nothing is copied. m is padded
to [H or 1, 2, MP, MP]: its rounding to the dtype of the moments, then the remainder, so that only moments are rounded.
"""

import triton
import triton.language as tl

NO_SPECIALIZE = ["ms", "BH", "H", "B", "M", "PARTS", "step", "first", "chunk", "count"]


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def blockmix_pad_mixing(m, out, ms, M, MP: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr):
    """Pad m (TURNED: m') of one head into out [heads, 2, MP, MP], zero outside M x M."""
    head = tl.program_id(0)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = e // MP
    j = e % MP
    if TURNED:
        at = j * ms[1] + i * ms[2]
    else:
        at = i * ms[1] + j * ms[2]
    x = tl.load(m + head * ms[0] + at, mask=(i < M) & (j < M), other=0.0).to(tl.float32)
    high = x.to(out.dtype.element_ty)
    out += head * 2 * MP * MP + e
    tl.store(out, high)
    tl.store(out + MP * MP, (x - high.to(tl.float32)).to(out.dtype.element_ty))


@triton.jit
def load_mixing(m, row, BM: tl.constexpr, MP: tl.constexpr, K0: tl.constexpr, K: tl.constexpr):
    """Load rows row.. and columns K0..K0+K of the padded m."""
    i = row * BM + tl.arange(0, BM)
    return tl.load(m + i[:, None] * MP + (K0 + tl.arange(0, K))[None, :])


@triton.jit
def load_columns(x, c, M, step, K0: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
    """Load columns c of the blocks K0..K0+K."""
    b = K0 + tl.arange(0, K)
    return tl.load(x + b[:, None] * step + c[None, :], mask=(b < M)[:, None] & (c < C)[None, :], other=0.0)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def blockmix_mix(
    m, x, other, out, grads, BH, B, H, M, PARTS, chunk, step, first, C: tl.constexpr, TILES: tl.constexpr,
    PER_HEAD: tl.constexpr, MP: tl.constexpr, BM: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, BC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute out_i = Sum_b m_ib x_b for BM rows i and `chunk` consecutive tiles of columns of one head; m stays in
    registers. Unless `other` is None (m is then the transposed matrix), also partial sums of dm_bi = Sum x_b other_i in
    the layout of `blockmix_mixing_grads`; x is read once."""
    BACK: tl.constexpr = other is not None
    pid = tl.program_id(0)
    row = pid % TILES  # neighbouring programs read the same columns
    if BACK:
        part = (pid // TILES) % PARTS
        bh = pid // (TILES * PARTS)
    else:
        bh = (pid // TILES) % BH
        part = pid // (TILES * BH)
    if PER_HEAD:
        m += (bh % H) * 2 * MP * MP
    h1 = load_mixing(m, row, BM, MP, 0, K1)
    l1 = load_mixing(m + MP * MP, row, BM, MP, 0, K1)
    g1 = tl.zeros([BM, K1], tl.float32)
    if K2 > 0:
        h2 = load_mixing(m, row, BM, MP, K1, K2)
        l2 = load_mixing(m + MP * MP, row, BM, MP, K1, K2)
        g2 = tl.zeros([BM, K2], tl.float32)
    head = BH.to(tl.int64) * C
    x += bh.to(tl.int64) * C
    i = row * BM + tl.arange(0, BM)
    out += bh.to(tl.int64) * C + i[:, None] * head
    if BACK:
        other += bh.to(tl.int64) * C + i[:, None] * head
    for t in tl.range(part * chunk, tl.minimum((part + 1) * chunk, tl.cdiv(C, BC)), num_stages=STAGES):
        c = t * BC + tl.arange(0, BC)
        inside = (i < M)[:, None] & (c < C)[None, :]
        if BACK:
            y = tl.load(other + c[None, :], mask=inside, other=0.0)
        x1 = load_columns(x, c, M, head, 0, K1, C)
        acc = tl.dot(h1, x1)
        acc = tl.dot(l1, x1, acc)
        if BACK:
            g1 = tl.dot(y, tl.trans(x1), g1)
        if K2 > 0:
            x2 = load_columns(x, c, M, head, K1, K2, C)
            acc = tl.dot(h2, x2, acc)
            acc = tl.dot(l2, x2, acc)
            if BACK:
                g2 = tl.dot(y, tl.trans(x2), g2)
        tl.store(out + c[None, :], acc.to(out.dtype.element_ty), mask=inside)
    if BACK:
        grads += (((bh % H) * B + bh // H).to(tl.int64) * step + first + part) * M * M
        store_columns(grads, g1, i, M, 0, K1)
        if K2 > 0:
            store_columns(grads, g2, i, M, K1, K2)


@triton.jit
def store_columns(grads, g, b, M, K0: tl.constexpr, K: tl.constexpr):
    """Store g' into rows K0..K0+K and columns b of [M, M]."""
    i = K0 + tl.arange(0, K)
    tl.store(grads + i[None, :] * M + b[:, None], g, mask=(b < M)[:, None] & (i < M)[None, :])


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def blockmix_mix_long(
    m, x, out, BH, H, M, C: tl.constexpr, TILES: tl.constexpr, PER_HEAD: tl.constexpr, MP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute `blockmix_mix` for float32 moments, or for more blocks than `blockmix_mix` supports: one tile of columns
    per program, with a loop over m."""
    pid = tl.program_id(0)
    row = pid % TILES
    bh = (pid // TILES) % BH
    c = (pid // (TILES * BH)) * BC + tl.arange(0, BC)
    i = row * BM + tl.arange(0, BM)
    if PER_HEAD:
        m += (bh % H) * 2 * MP * MP
    step = BH.to(tl.int64) * C
    x += bh.to(tl.int64) * C + c[None, :]
    acc = tl.zeros([BM, BC], tl.float32)
    for start in range(0, M, BK):
        b = start + tl.arange(0, BK)
        tx = tl.load(x + b[:, None] * step, mask=(b < M)[:, None] & (c < C)[None, :], other=0.0)
        at = m + i[:, None] * MP + b[None, :]
        if x.dtype.element_ty == tl.float32:
            acc = add_tile(acc, tl.load(at), tx, PREC)
        else:
            acc = tl.dot(tl.load(at), tx, acc)
            acc = tl.dot(tl.load(at + MP * MP), tx, acc)
    to = out + bh.to(tl.int64) * C + i[:, None] * step + c[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(i < M)[:, None] & (c < C)[None, :])


@triton.jit
def add_tile(acc, a, b, PREC: tl.constexpr):
    """Return acc + a b. Tensor cores, which truncate the accumulator, sum only within the tile."""
    # a nonzero constant keeps the sum from being folded into the product; its value has no other meaning
    return acc + tl.dot(a, b, input_precision=PREC, max_num_imprecise_acc=16)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def blockmix_mixing_grads(
    dx, x, out, BH, B, H, M, PARTS, chunk, step, first, C: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute partial sums of dm_ib = Sum dx~_i x_b over `chunk` consecutive tiles of columns of one head, in out
    [H, B, step, M, M] at index `first` + part."""
    pid = tl.program_id(0)
    i = (pid % TILES) * BM + tl.arange(0, BM)
    j = ((pid // TILES) % TILES) * BM + tl.arange(0, BM)
    pid = pid // (TILES * TILES)
    part = pid % PARTS
    bh = pid // PARTS
    row = BH.to(tl.int64) * C
    acc = tl.zeros([BM, BM], tl.float32)
    cc = tl.arange(0, BC)
    dx += bh.to(tl.int64) * C + i[:, None] * row
    x += bh.to(tl.int64) * C + j[:, None] * row
    for tile in range(part * chunk, tl.minimum((part + 1) * chunk, tl.cdiv(C, BC))):
        c = tile * BC + cc
        inside = (c < C)[None, :]
        ta = tl.load(dx + c[None, :], mask=inside & (i < M)[:, None], other=0.0)
        tb = tl.load(x + c[None, :], mask=inside & (j < M)[:, None], other=0.0)
        acc = add_tile(acc, ta, tl.trans(tb), PREC)
    to = out + (((bh % H) * B + bh // H).to(tl.int64) * step + first + part) * M * M
    tl.store(to + i[:, None] * M + j[None, :], acc, mask=(i < M)[:, None] & (j < M)[None, :])


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def blockmix_sum_parts(parts, out, count, step, BP: tl.constexpr, BE: tl.constexpr):
    """Compute out [groups, step], the sum over `count` parts [groups, count, step], in a fixed order."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    group = tl.program_id(1).to(tl.int64)
    parts += group * count * step + e[None, :]
    p = tl.arange(0, BP)
    acc = tl.zeros([BP, BE], tl.float32)
    for start in range(0, count, BP):
        at = start + p
        keep = (at < count)[:, None] & (e < step)[None, :]
        acc += tl.load(parts + at[:, None].to(tl.int64) * step, mask=keep, other=0.0)
    tl.store(out + group * step + e, tl.sum(acc, 0).to(out.dtype.element_ty), mask=e < step)
