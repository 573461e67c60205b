"""Tokens of a program: part of a head, padding masks, packed sequences."""

import triton
import triton.language as tl


@triton.jit
def place(H, PARTS, ROLES: tl.constexpr = 1):
    """Return (batch, head, part) of this program, the same for ROLES neighbours. Neighbouring programs read
    neighbouring heads of the same tokens."""
    pid = tl.program_id(0) // ROLES
    return pid // (H * PARTS), pid % H, (pid // H) % PARTS


@triton.jit
def longest(N):
    """Return the number of tokens of the longest sequence."""
    return (tl.full([], 0.0, tl.float32) + N[0]).to(tl.int32)  # in the interpreter N[0] is a number of Python


@triton.jit
def span(N, b, head, scale):
    """Return for one (batch, head): (batch, first token); its tokens (number, number of real ones and, with a mask, the
    mask); and the scale of its moments. N = (largest number of tokens, spans, counts, keep), see
    `sequences.Sequences.tables`."""
    at = (b, 0)
    n, s = means(N, head, scale)
    most = longest(N)
    many = (most, n)
    if N[1] is not None:  # packed sequences
        at = (b * 0, tl.load(N[1] + 2 * b))
        many = (tl.load(N[1] + 2 * b + 1).to(tl.int32), n)
    if N[3] is not None:
        many = (most, n, N[3] + b.to(tl.int64) * most)  # type: ignore[assignment]
    return at, many, s


@triton.jit
def means(N, head, scale):
    """Return (number of real tokens, scale of a moment) of one (batch, head); counts [B * H, 2] if sequences differ."""
    n = tl.full([], 0.0, tl.float32) + N[0]  # in the interpreter it is a number of Python
    s = scale
    if N[2] is not None:
        n = tl.load(N[2] + 2 * head)
        s = tl.load(N[2] + 2 * head + 1)
    return n, s


@triton.jit
def alive(i, N):
    """Return which of the tokens i are real."""
    live = i < N[0]
    if len(N) == 3:
        live = live & (tl.load(N[2] + i, mask=live, other=0) != 0)
    return live


@triton.jit
def anew(i, start, ON: tl.constexpr = True):
    """Return the rows i of a tile that begins at `start`. ON: addresses derived from them are recomputed in every
    iteration; kept between iterations they would take a tenth of the registers of a full loop."""
    if ON:
        i = i + (start >> 30)
    return i


@triton.jit
def upto(hi, N):
    """Limit the tokens N to those below hi."""
    out = (tl.minimum(hi, N[0]), N[1])
    if len(N) == 3:
        out = (tl.minimum(hi, N[0]), N[1], N[2])  # type: ignore[assignment]
    return out
