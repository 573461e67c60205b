"""Feature maps of q and k on token tiles, and their derivatives.

0 identity, 1 relu, 2 elu + 1, 3 softmax over D, 4 the softmax pair [softmax(x), softmax(-x)]: the raw tile has R1
columns (R2 = 0) and the features are the two halves of a pair of width R1 each. Evaluated in float32, returned in the
dtype of the tokens, because the features are operands of matrix products. Dead rows and columns give zero features:
they must not reach a sum.
"""

import triton
import triton.language as tl

from .tiles import load_rows


@triton.jit
def masked_softmax(x1, x2, live, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr):
    """softmax over the D columns of a raw pair in float32; the second tile only counts when R2 > 0."""
    c1 = tl.arange(0, R1)
    x1 = tl.where((c1 < D)[None, :], x1, -float("inf"))
    top = tl.max(x1, 1)
    if R2 > 0:
        x2 = tl.where((R1 + tl.arange(0, R2) < D)[None, :], x2, -float("inf"))
        top = tl.maximum(top, tl.max(x2, 1))
    e1 = tl.exp(x1 - top[:, None])
    e2 = e1
    total = tl.sum(e1, 1)
    if R2 > 0:
        e2 = tl.exp(x2 - top[:, None])
        total += tl.sum(e2, 1)
    weight = tl.where(live, 1.0 / total, 0.0)[:, None]
    return e1 * weight, e2 * weight


@triton.jit
def elu1(x, live, C0: tl.constexpr, CN: tl.constexpr, D: tl.constexpr):
    """elu(x) + 1 on columns C0..C0+CN; the exponential sees x <= 0 only, so it cannot overflow."""
    y = tl.maximum(x, 0.0) + tl.exp2(tl.minimum(x, 0.0) * 1.4426950408889634)
    keep = live[:, None]
    if C0 + CN > D:
        keep = keep & (C0 + tl.arange(0, CN) < D)[None, :]
    return tl.where(keep, y, 0.0)


@triton.jit
def phi32(x, live, FMAP: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr):
    """Features of a raw pair in float32."""
    x1 = x[0].to(tl.float32)
    x2 = x[1].to(tl.float32)
    if FMAP == 1:
        x1 = tl.maximum(x1, 0.0)
        x2 = tl.maximum(x2, 0.0)
    elif FMAP == 2:
        x1 = elu1(x1, live, 0, R1, D)
        if R2 > 0:
            x2 = elu1(x2, live, R1, R2, D)
    elif FMAP == 3:
        x1, x2 = masked_softmax(x1, x2, live, D, R1, R2)
    elif FMAP == 4:
        n1, _ = masked_softmax(-x1, x2, live, D, R1, 0)
        x1, _ = masked_softmax(x1, x2, live, D, R1, 0)
        x2 = n1
    return x1, x2


@triton.jit
def phi(x, live, FMAP: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr):
    """Features of a raw pair in the dtype of the tokens."""
    y1 = x[0]
    y2 = x[1]
    if FMAP > 0:
        f1, f2 = phi32(x, live, FMAP, D, R1, R2)
        y1 = f1.to(x[0].dtype)
        y2 = y1
        if R2 > 0 or FMAP == 4:
            y2 = f2.to(x[0].dtype)
    return y1, y2


@triton.jit
def phi_and_rest(x, live, FMAP: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr):
    """(phi in float32, rounded to the dtype of the tokens, what the rounding left)."""
    f1, f2 = phi32(x, live, FMAP, D, R1, R2)
    dtype: tl.constexpr = x[0].dtype
    h1 = f1.to(dtype)
    l1 = (f1 - h1.to(tl.float32)).to(dtype)
    h2 = h1
    l2 = l1
    if R2 > 0 or FMAP == 4:
        h2 = f2.to(dtype)
        l2 = (f2 - h2.to(tl.float32)).to(dtype)
    return (f1, f2), (h1, h2), (l1, l2)


@triton.jit
def phi_grad(f, g, FMAP: tl.constexpr, R2: tl.constexpr):
    """d loss / d x as a raw pair, from f = phi(x) and g = d loss / d phi(x) in float32."""
    f1 = f[0].to(tl.float32)
    f2 = f[1].to(tl.float32)
    g1 = g[0]
    g2 = g[1]
    if FMAP == 1:
        g1 = tl.where(f1 > 0, g1, 0.0)
        if R2 > 0:
            g2 = tl.where(f2 > 0, g2, 0.0)
    elif FMAP == 2:  # the derivative is exp(x) = phi below 0, where phi <= 1, and 1 above
        g1 = g1 * tl.minimum(f1, 1.0)
        if R2 > 0:
            g2 = g2 * tl.minimum(f2, 1.0)
    elif FMAP == 3:
        mean = tl.sum(g1 * f1, 1)
        if R2 > 0:
            mean += tl.sum(g2 * f2, 1)
            g2 = f2 * (g2 - mean[:, None])
        g1 = f1 * (g1 - mean[:, None])
    elif FMAP == 4:
        plus = f1 * (g1 - tl.sum(g1 * f1, 1)[:, None])
        g1 = plus - f2 * (g2 - tl.sum(g2 * f2, 1)[:, None])
    return g1, g2


@triton.jit
def load_features(
    ptr, i, stride, live, FMAP: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, ONCE: tl.constexpr
):
    """phi of rows i; ONCE as in load_rows."""
    return phi(load_rows(ptr, i, stride, live, D, R1, R2, ONCE), live, FMAP, D, R1, R2)


@triton.jit
def power_of_two(x):
    """The power of two at or just below x > 0 (for x = 0 the smallest normal one)."""
    return tl.exp2(tl.floor(tl.log2(tl.maximum(x, 1.2e-38))))
