"""Triton kernels of `rms_norm`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_row(ptr, C: tl.constexpr, BC: tl.constexpr):
    """Load the C channels of a token, or of the weights, as float32."""
    c = tl.arange(0, BC)
    return tl.load(ptr + c, mask=c < C, other=0.0).to(tl.float32)


@triton.jit
def turn(y, cos, sin, token, BACK: tl.constexpr, HALF: tl.constexpr, BC: tl.constexpr):
    """Rotate channels (2i, 2i + 1) of each head (2 HALF channels) by the angles of a token, with BACK by the opposite
    angles. Returns y if cos is None."""
    out = y
    if cos is not None:
        at = token * HALF + tl.arange(0, BC // 2) % HALF
        c = tl.load(cos + at)
        s = tl.load(sin + at)
        if BACK:
            s = -s
        a, b = tl.split(tl.reshape(y, [BC // 2, 2]))
        out = tl.reshape(tl.join(a * c - b * s, b * c + a * s), [BC])
    return out


@triton.jit(do_not_specialize=["stride", "eps", "N"])
def norm_rows(
    x, w, cos, sin, y, inverses, stride, eps, N, RELU: tl.constexpr, HALF: tl.constexpr, C: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Store y = x r w of one token, with RELU its positive part, rotated; and r."""
    row = tl.program_id(0).to(tl.int64)
    t = load_row(x + row * stride, C, BC)
    inverse = 1.0 / tl.sqrt(tl.sum(t * t, 0) / C + eps)
    c = tl.arange(0, BC)
    out = t * inverse * load_row(w, C, BC)
    if RELU:
        out = tl.where(out <= 0, 0.0, out)  # keeps NaN
    out = turn(out, cos, sin, row % N, False, HALF, BC)
    tl.store(y + row * C + c, out.to(y.dtype.element_ty), mask=c < C)
    tl.store(inverses + row, inverse)


@triton.jit(do_not_specialize=["rows", "gs", "xs", "N"])
def norm_grads(
    g, x, w, cos, sin, inverses, dx, parts, rows, gs, xs, N, RELU: tl.constexpr, HALF: tl.constexpr, C: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Store dx of a program's tokens (strided), and the sum of g x r over them in parts [programs, C]."""
    pid = tl.program_id(0)
    c = tl.arange(0, BC)
    weight = load_row(w, C, BC)
    acc = tl.zeros([BC], tl.float32)
    for row in range(pid, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64)
        inverse = tl.load(inverses + at)
        t = load_row(x + at * xs, C, BC) * inverse
        tg = turn(load_row(g + at * gs, C, BC), cos, sin, at % N, True, HALF, BC)
        if RELU:
            tg = tl.where(t * weight > 0, tg, 0.0)
        acc += tg * t
        tg *= weight
        out = (tg - t * (tl.sum(tg * t, 0) / C)) * inverse
        tl.store(dx + at * C + c, out.to(dx.dtype.element_ty), mask=c < C)
    tl.store(parts + pid * C + c, acc, mask=c < C)
