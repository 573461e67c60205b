"""D x D algebra between the passes over tokens, in float32.

The matrices of a head are in workspaces at numbered places, so that one kernel serves all of them.
"""

import triton
import triton.language as tl

from ..loops.extent import means

NO_SPECIALIZE = [
    "N", "H", "PARTS", "heads", "LENGTH", "PITCH", "WIDTH", "INNER", "OFF", "KA", "KB", "KO", "KX", "scale",
    "ridge", "BLOCKS", "at", "bt", "ot", "xt", "pa", "pb", "po", "px", "rows", "inner", "cols", "ca", "cx", "beta",
]  # fmt: skip


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def block_finish(
    parts, out, N, PARTS, heads, LENGTH, PITCH, WIDTH, INNER, OFF, KO, scale, ridge, BLOCKS, SCALED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Add the parts [PARTS, B * H, LENGTH] of a matrix in order; scale it as a moment, add a ridge. Columns from INNER
    on (v = 1 with a centred factor) are zero."""
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    _, s = means(N, head, scale)
    e = (tl.program_id(0) % BLOCKS) * WIDE + tl.arange(0, WIDE)
    i = e // PITCH
    j = e % PITCH
    total = tl.zeros([WIDE], tl.float32)
    for part in range(PARTS):
        at = parts + (part * heads.to(tl.int64) + head) * LENGTH
        total += tl.load(at + e, mask=(e < LENGTH) & (j < INNER), other=0.0)
    if SCALED:
        total *= s
    total += tl.where(i == j, ridge, 0.0)
    tl.store(out + head * KO + OFF + e, total, mask=(e < LENGTH) & (j < WIDTH))


@triton.jit
def load_matrix(ptr, i, j, pitch, rows, cols, TURNED: tl.constexpr):
    """Elements (i, j) of a matrix [rows, cols], or of the transpose of what lies in memory."""
    mask = (i < rows)[:, None] & (j < cols)[None, :]
    if TURNED:
        x = tl.load(ptr + j[None, :] * (pitch * 16) + i[:, None], mask=mask, other=0.0)
    else:
        x = tl.load(ptr + i[:, None] * (pitch * 16) + j[None, :], mask=mask, other=0.0)
    return x


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def block_product(
    a, b, x, out, coefficients, H, at, pa, KA, bt, pb, KB, xt, px, KX, ot, po, KO, rows, inner, cols, ca, cx, beta,
    TURN_A: tl.constexpr, TURN_B: tl.constexpr, PREC: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute out = c[ca] A B + beta c[cx] X, with places, pitches and lengths of a head in units of 16; c[-1] = 1."""
    blocks = (cols + COLS - 1) // COLS
    each = ((rows + ROWS - 1) // ROWS) * blocks
    pid = tl.program_id(0)
    head = (pid // each).to(tl.int64)
    i = ((pid % each) // blocks) * ROWS + tl.arange(0, ROWS)
    j = (pid % blocks) * COLS + tl.arange(0, COLS)
    c = coefficients + (head % H) * 4
    alpha = tl.load(c + ca, mask=ca >= 0, other=1.0).to(tl.float32)
    more = beta * tl.load(c + cx, mask=cx >= 0, other=1.0).to(tl.float32)
    a += (head * KA + at) * 16
    b += (head * KB + bt) * 16
    acc = tl.zeros([ROWS, COLS], tl.float32)
    m = tl.arange(0, DEPTH)
    for start in range(0, inner, DEPTH):
        ta = load_matrix(a, i, start + m, pa, rows, inner, TURN_A)
        tb = load_matrix(b, start + m, j, pb, inner, cols, TURN_B)
        # not one chain of sums of all: the number keeps them apart, as in `tokens.add_tile`
        acc = acc + tl.dot(ta, tb, input_precision=PREC, max_num_imprecise_acc=16)
    tx = load_matrix(x + (head * KX + xt) * 16, i, j, px, rows, tl.where(beta == 0.0, 0, cols), False)
    to = out + (head * KO + ot) * 16 + i[:, None] * (po * 16) + j[None, :]
    tl.store(to, alpha * acc + more * tx, mask=(i < rows)[:, None] & (j < cols)[None, :])


@triton.jit(do_not_specialize=["H"])
def block_mixture(
    state, work, coefficients, out, H, K: tl.constexpr, KW: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    G: tl.constexpr, SG: tl.constexpr, RG: tl.constexpr, WSG: tl.constexpr, DP: tl.constexpr, DC: tl.constexpr,
    E: tl.constexpr, PITCH: tl.constexpr, LENGTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dP = c1 G + c3 R'G + c4 W S G and dC = c2 S G of `polynomial` [., E], and unless `out` is None parts
    [B, H, BLOCKS, 4] of d coefficients: <P, G>, <C, S G>, <P, R'G>, <P, W S G>."""
    BLOCKS: tl.constexpr = (LENGTH + WIDE - 1) // WIDE
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    e = (tl.program_id(0) % BLOCKS) * WIDE + tl.arange(0, WIDE)
    live = (e < LENGTH) & (e % PITCH < E)
    s = state + head * K + e
    w = work + head * KW + e
    c = coefficients + (head % H) * 4
    p = tl.load(s + P, mask=live, other=0.0)
    g = tl.load(w + G, mask=live, other=0.0)
    sg = tl.load(w + SG, mask=live, other=0.0)
    rg = tl.load(w + RG, mask=live, other=0.0)
    wsg = tl.load(w + WSG, mask=live, other=0.0)
    c1, c2 = tl.load(c).to(tl.float32), tl.load(c + 1).to(tl.float32)
    c3, c4 = tl.load(c + 2).to(tl.float32), tl.load(c + 3).to(tl.float32)
    tl.store(w + DP, c1 * g + c3 * rg + c4 * wsg, mask=live)
    tl.store(w + DC, c2 * sg, mask=live)
    if out is not None:
        to = out + tl.program_id(0) * 4
        tl.store(to, tl.sum(p * g))
        tl.store(to + 1, tl.sum(tl.load(s + C, mask=live, other=0.0) * sg))
        tl.store(to + 2, tl.sum(p * rg))
        tl.store(to + 3, tl.sum(p * wsg))
