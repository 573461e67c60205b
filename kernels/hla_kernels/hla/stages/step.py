"""Kernel of one token: every state is read and written once.

A stage LA(x, y, z) of a single token is H' = g H + y z', o = s H'x. One program per query head runs the stages of an
operator one after the other, with a whole state [D, Dz] in registers; all in float32.
"""

import triton
import triton.language as tl

from .kernels import places
from .tiles import log2_of, powers


@triton.jit
def stage(x, y, z, ze, IN, OUT, g, scale, D: tl.constexpr, WZ: tl.constexpr, DP: tl.constexpr, ZP: tl.constexpr,
          EXTRA: tl.constexpr):  # fmt: skip
    """Return s H'x and its extra channel, and store H'. IN, OUT: states [D, Dz], or [D, Dz + 1] if EXTRA; ze: the extra
    channel of z."""
    stride: tl.constexpr = WZ + 1 if EXTRA else WZ
    place, exists = places(D, WZ, stride, 1, DP, 0, ZP)
    h = tl.load(IN + place, exists, other=0.0) * g + y[:, None] * z[None, :]
    tl.store(OUT + place, h, exists)
    more = 0.0
    if EXTRA:
        d = tl.arange(0, DP)
        col = tl.load(IN + d * stride + WZ, d < D, other=0.0) * g + y * ze
        tl.store(OUT + d * stride + WZ, col, d < D)
        more = tl.sum(x * col, 0) * scale
    return tl.sum(x[:, None] * h, 0) * scale, more


@triton.jit(do_not_specialize=["group", "scale", "eps"])
def causal_step(
    Q, K, V, LOG2, IN, OUT, O, group, scale, eps, GROUPS: tl.constexpr, OP: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """Compute O [B, H, Dv] of Q [B, H, D], K [B, Hk, D], V [B, Hk, Dv], and the states OUT from IN, tuples in the order
    of the stages. LOG2: per query head; GROUPS: whether a state is stored per query head, not per key head."""
    b, h, heads = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    one, shared = b * heads + h, (b * heads + h) // group
    d, e = tl.arange(0, DP), tl.arange(0, VP)
    g = powers(log2_of(LOG2, h), 1, LOG2 is not None)
    q = tl.load(Q + one * D + d, d < D, other=0.0).to(tl.float32)
    k = tl.load(K + shared * D + d, d < D, other=0.0).to(tl.float32)
    v = tl.load(V + shared * DV + e, e < DV, other=0.0).to(tl.float32)
    y, z, ze = k, v, 1.0
    n: tl.constexpr = len(GROUPS)
    if OP == "hla2" or OP == "hla3":
        at = (one if GROUPS[0] else shared) * D * D
        u, _ = stage(q, k, k, 0.0, IN[0] + at, OUT[0] + at, g, scale, D, D, DP, DP, False)
        y = u
    size: tl.constexpr = D * (DV + 1) if RATIO else D * DV
    if OP == "ahla" or OP == "hla3":
        at = (one if GROUPS[n - 2] else shared) * size
        z, ze = stage(q, k, v, 1.0, IN[n - 2] + at, OUT[n - 2] + at, g, scale, D, DV, DP, VP, RATIO)
    at = (one if GROUPS[n - 1] else shared) * size
    o, total = stage(q, y, z, ze, IN[n - 1] + at, OUT[n - 1] + at, g, scale, D, DV, DP, VP, RATIO)
    if RATIO:
        o = o / (total + eps)
    tl.store(O + one * DV + e, o.to(O.dtype.element_ty), e < DV)
