"""Which tokens a program has: its part of a head, padding masks, sequences packed behind each other."""

import triton
import triton.language as tl

FEW = tl.constexpr(16)  # tokens beyond whole tiles: columns of a product of 64 rows


@triton.jit
def place(H, PARTS, ROLES: tl.constexpr = 1):
    """(batch, head, part) of this program, ROLES neighbours have the same; neighbouring programs read neighbouring
    heads of the same tokens."""
    pid = tl.program_id(0) // ROLES
    return pid // (H * PARTS), pid % H, (pid // H) % PARTS


@triton.jit
def longest(N):
    """Tokens of the longest sequence."""
    return (tl.full([], 0.0, tl.float32) + N[0]).to(tl.int32)  # in the interpreter N[0] is a number of Python


@triton.jit
def span(N, b, head, scale):
    """Of one (batch, head): its (batch, first token), its tokens (how many, how many are real and, under a mask, which
    ones), the scale of its moments. N = (most tokens, spans, counts, keep): `sequences.Sequences.tables`."""
    at = (b, 0)
    n, s = means(N, head, scale)
    most = longest(N)
    many = (most, n)
    if N[1] is not None:  # sequences packed behind each other
        at = (b * 0, tl.load(N[1] + 2 * b))
        many = (tl.load(N[1] + 2 * b + 1).to(tl.int32), n)
    if N[3] is not None:
        many = (most, n, N[3] + b.to(tl.int64) * most)  # type: ignore[assignment]
    return at, many, s


@triton.jit
def means(N, head, scale):
    """(number of real tokens, scale of a moment) of one (batch, head); counts [B * H, 2] when sequences differ."""
    n = tl.full([], 0.0, tl.float32) + N[0]  # in the interpreter it is a number of Python
    s = scale
    if N[2] is not None:
        n = tl.load(N[2] + 2 * head)
        s = tl.load(N[2] + 2 * head + 1)
    return n, s


@triton.jit
def alive(i, N):
    """Which of the tokens i are real."""
    live = i < N[0]
    if len(N) == 3:
        live = live & (tl.load(N[2] + i, mask=live, other=0) != 0)
    return live


@triton.jit
def anew(i, start, ON: tl.constexpr = True):
    """The rows i of a tile whose first is `start`. ON: addresses that are made of them are computed in every turn; kept
    from turn to turn they take a tenth of the registers of a loop that fills them."""
    if ON:
        i = i + (start >> 30)
    return i


@triton.jit
def upto(hi, N):
    """The tokens below hi."""
    out = (tl.minimum(hi, N[0]), N[1])
    if len(N) == 3:
        out = (tl.minimum(hi, N[0]), N[1], N[2])  # type: ignore[assignment]
    return out


@triton.jit
def full_tiles(n, BN: tl.constexpr):
    """Tiles of BN for n tokens, but for a last one of up to FEW."""
    return (n + BN - FEW - 1) // BN
