"""Feature maps of q and k on token tiles, and their derivatives.

0 identity, 1 relu, 2 elu + 1, 5 elu, that is elu + 1 shifted by 1: elu is exact above 0 and small below, so that
rounding it costs less, and what is common to all tokens does not cancel where features or values are centred; `unshift`
and one row per read-out put the 1 back where nothing is centred. 8, 9: the tokens are features of 5 and 1 already,
which the forward kept for the backward. 3 softmax over D, of block mixing alone (`blockmix.fused`). Evaluated in
float32, returned in the dtype of the tokens, because the features are operands of matrix products. Dead rows and
columns give zero features: they must not reach a sum.
"""

import triton
import triton.language as tl

from ..tiles import axpy2, load_rows, rank1, zeros2
from .elu import below, elu, elu16, elu_slope, wide


@triton.jit
def exp(x):
    """Return exp(x) of x <= 0 in float32, as the device approximates it."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def masked_softmax(x1, x2, live, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr):
    """softmax over the D columns of a raw pair in float32; the second tile only counts when R2 > 0."""
    c1 = tl.arange(0, R1)
    x1 = tl.where((c1 < D)[None, :], x1, -float("inf"))
    top = tl.max(x1, 1)
    if R2 > 0:
        x2 = tl.where((R1 + tl.arange(0, R2) < D)[None, :], x2, -float("inf"))
        top = tl.maximum(top, tl.max(x2, 1))
    e1 = exp(x1 - top[:, None])
    e2 = e1
    total = tl.sum(e1, 1)
    if R2 > 0:
        e2 = exp(x2 - top[:, None])
        total += tl.sum(e2, 1)
    weight = tl.where(live, 1.0 / total, 0.0)[:, None]
    y1 = e1 * weight
    y2 = e2 * weight
    return y1, y2


@triton.jit
def elu1(x, live, C0: tl.constexpr, CN: tl.constexpr, D: tl.constexpr):
    """elu(x) + 1 on columns C0..C0+CN; the exponential sees x <= 0 only, so it cannot overflow."""
    y = tl.maximum(x, 0.0) + exp(tl.minimum(x, 0.0))
    keep = live[:, None]
    if C0 + CN > D:
        keep = keep & (C0 + tl.arange(0, CN) < D)[None, :]
    return tl.where(keep, y, 0.0)


@triton.constexpr_function
def is_plain(FMAP):
    """Whether tokens are used as they are."""
    return FMAP in (0, 8, 9)


@triton.constexpr_function
def is_shifted(FMAP):
    """Whether the kernels compute with phi - 1."""
    return FMAP in (5, 8)


@triton.constexpr_function
def keys_alone(ORDER, NORM, CENTER, MEAN, FMAP):
    """Whether a forward sums transformed keys only: a ratio of first order."""
    return ORDER == 1 and NORM and CENTER == 0 and not MEAN and FMAP in (1, 5)


@triton.constexpr_function
def kept(FMAP):
    """Return the map of the features that a pass with this one wrote."""
    return {1: 9, 5: 8}[FMAP]


@triton.constexpr_function
def shift_of(FMAP, CENTER):
    """Return the difference between the features and the shifted features of `read_out` and the sums for its row."""
    return 1.0 if FMAP in (5, 8) and CENTER < 2 else 0.0


@triton.jit
def ones2(D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Return the vector of ones on D elements, zero beyond."""
    z = zeros2(D1, D2)
    x2 = z[1]
    if D2 > 0:
        x2 = tl.where(D1 + tl.arange(0, D2) < D, 1.0, 0.0)
    return tl.where(tl.arange(0, D1) < D, 1.0, 0.0), x2


@triton.jit
def unshift(
    m, sums, n, ORDER: tl.constexpr, CENTER: tl.constexpr, ONES: tl.constexpr, D: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr, V2: tl.constexpr,
):  # fmt: skip
    """Convert moments (P, S, C, R, W) of f over n tokens to moments of phi = f + 1: Sum (f + 1)(g + 1)' = Sum f g' +
    1 Sum g' + (Sum f + n 1) 1'. Centred moments (ONES: v is centred) do not change."""
    mp, ms, mc, mr, mw = m
    sq, sk, sv = sums
    one = ones2(D, F1, F2)
    q = axpy2(sq, n, one, F2)
    k = axpy2(sk, n, one, F2)
    if CENTER == 0 and not ONES and ORDER != 2 and ORDER != 6:
        mp = rank1(mp, one, sv, F2, V2)
    if CENTER <= 1 and not ONES and (ORDER == 2 or ORDER >= 5):
        mc = rank1(mc, one, sv, F2, V2)
    if CENTER == 0 and (ORDER == 2 or ORDER == 4 or ORDER == 5):
        ms = rank1(rank1(ms, one, sk, F2, F2), k, one, F2, F2)
    if CENTER == 0 and (ORDER == 3 or ORDER >= 5):
        mr = rank1(rank1(mr, one, sq, F2, F2), k, one, F2, F2)
    if CENTER <= 1 and (ORDER == 4 or ORDER == 5):
        mw = rank1(rank1(mw, one, sq, F2, F2), q, one, F2, F2)
    return mp, ms, mc, mr, mw


@triton.jit
def unshift_sums(sums, n, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr):
    """Convert (sum q, sum k, sum v) of f over n tokens to phi = f + 1."""
    one = ones2(D, F1, F2)
    return axpy2(sums[0], n, one, F2), axpy2(sums[1], n, one, F2), sums[2]


@triton.jit
def unshift_grad(dm, sg, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, V2: tl.constexpr):
    """Return dM' = Sum g phi' from Sum g f' and sum g."""
    return rank1(dm, sg, ones2(D, F1, F2), V2, F2)


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
    elif FMAP == 5:
        x1 = elu(x1)
        x2 = elu(x2)
    return x1, x2


@triton.jit
def phi(x, live, FMAP: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr):
    """Features of a raw pair in the dtype of the tokens."""
    y1 = x[0]
    y2 = x[1]
    if not is_plain(FMAP):
        f1, f2 = phi32(x, live, FMAP, D, R1, R2)
        y1 = f1.to(x[0].dtype)
        y2 = y1
        if R2 > 0:
            y2 = f2.to(x[0].dtype)
    return y1, y2


@triton.jit
def phi_in_pairs(x, live, FMAP: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr):
    """`phi`, the same numbers; of one block of columns by `elu16`, with which two would spill."""
    if FMAP == 5 and R2 == 0:
        y = elu16(x[0])
        out = (y, y)
    else:
        out = phi(x, live, FMAP, D, R1, R2)
    return out


@triton.jit
def phi_and_rest(x, live, FMAP: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr):
    """Return (phi in float32, rounded to the dtype of the tokens, what the rounding left)."""
    f1, f2 = phi32(x, live, FMAP, D, R1, R2)
    dtype: tl.constexpr = x[0].dtype
    h1 = f1.to(dtype)
    l1 = (f1 - h1.to(tl.float32)).to(dtype)
    h2 = h1
    l2 = l1
    if R2 > 0:
        h2 = f2.to(dtype)
        l2 = (f2 - h2.to(tl.float32)).to(dtype)
    h = (h1, h2)
    if FMAP == 5 and R2 == 0:
        h = phi_in_pairs(x, live, FMAP, D, R1, R2)
    return (f1, f2), h, (l1, l2)


@triton.jit
def phi_grad(f, g, FMAP: tl.constexpr, R2: tl.constexpr):
    """Return d loss / d x as a raw pair, from f = phi(x) and g = d loss / d phi(x) in float32."""
    f1 = f[0].to(tl.float32)
    f2 = f[1].to(tl.float32)
    g1 = g[0]
    g2 = g[1]
    if FMAP == 1 or FMAP == 9:
        g1 = tl.where(f1 > 0, g1, 0.0)
        if R2 > 0:
            g2 = tl.where(f2 > 0, g2, 0.0)
    elif FMAP == 2:  # the derivative is exp(x) = phi below 0, where phi <= 1, and 1 above
        g1 = g1 * tl.minimum(f1, 1.0)
        if R2 > 0:
            g2 = g2 * tl.minimum(f2, 1.0)
    elif FMAP == 5 or FMAP == 8:
        g1 = elu_slope(f[0], g1)
        if R2 > 0:
            g2 = elu_slope(f[1], g2)
    elif FMAP == 3:
        mean = tl.sum(g1 * f1, 1)
        if R2 > 0:
            mean += tl.sum(g2 * f2, 1)
            g2 = f2 * (g2 - mean[:, None])
        g1 = f1 * (g1 - mean[:, None])
    return g1, g2


@triton.jit
def slope_times(x, g, R2: tl.constexpr):
    """d loss / d x of elu from the token x and g = d loss / d phi(x): what `phi_grad` has of the rounded feature."""
    g2 = g[1]
    if R2 > 0:
        x1 = x[0].to(tl.float32)
        g2 = g[1] - g[1] * below(x[1].to(tl.float32))
    else:
        x1 = wide(x[0])
    return g[0] - g[0] * below(x1), g2


@triton.jit
def load_features(
    ptr, i, stride, live, FMAP: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, ONCE: tl.constexpr
):
    """Return phi of rows i; ONCE as in load_rows."""
    return phi(load_rows(ptr, i, stride, live, D, R1, R2, ONCE), live, FMAP, D, R1, R2)


@triton.jit
def power_of_two(x):
    """Return the power of two at or just below x > 0 (for x = 0 the smallest normal one)."""
    return tl.exp2(tl.floor(tl.log2(tl.maximum(x, 1.2e-38))))
