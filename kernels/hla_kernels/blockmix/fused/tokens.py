"""What the passes over tokens share: a block's operator, scaled tiles, the gradient of a ratio."""

import triton
import triton.language as tl

from ...hla.fused.algebra import largest
from ...hla.fused.loops.writes import as_row
from ...hla.fused.maps import power_of_two
from ...hla.fused.tiles import axpy2, cast4, load4, load_vec, rowdot, scale4
from .vectors import times_vector

NO_SPECIALIZE = ["qs", "ks", "vs", "os", "gs", "dqs", "dks", "dvs", "GEO", "N", "H", "BH", "M", "chunk", "scale", "eps"]


@triton.jit
def load_operator(
    ptr, dtype: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr,
):  # fmt: skip
    """(P' [V, F] in the dtype of the tokens, its unit): float16 lacks the exponents of moments, a unit has them."""
    m = load4(ptr, DV, V1, V2, D, F1, F2, D, 1)
    unit = 1.0
    if dtype == tl.float16:
        unit = power_of_two(largest(m, V2, F2))
        m = scale4(m, 1.0 / unit)
    return cast4(m, dtype), unit


@triton.jit
def times(x, factor, D2: tl.constexpr):
    """Each token of a tile, in float32, times a factor [BN, 1] or a number."""
    x2 = x[1]
    if D2 > 0:
        x2 = x[1].to(tl.float32) * factor
    return x[0].to(tl.float32) * factor, x2


@triton.jit
def low_digits(x, high, dtype: tl.constexpr, D2: tl.constexpr):
    """What rounding x to `high` left, in the dtype of the tokens."""
    l1 = (x[0] - high[0].to(tl.float32)).to(dtype)
    l2 = l1
    if D2 > 0:
        l2 = (x[1] - high[1].to(tl.float32)).to(dtype)
    return l1, l2


@triton.jit
def ratio_grad(fq, tg, gq, inverse, z, a, eps, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, V2: tl.constexpr):
    """(d loss / d phi(q), d loss / d den) of a tile from gq = do P~', 1 / den, z~ at a pointer, `columns` of the
    anchor."""
    total = (eps * times_vector(tg, a, V2) - rowdot(fq, gq, F2)) * inverse * inverse
    gq = times(gq, inverse[:, None], F2)
    return axpy2(gq, total[:, None], as_row(load_vec(z, D, F1, F2)), F2), total
