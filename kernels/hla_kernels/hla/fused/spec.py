"""Non-tensor arguments of launches: constexpr flags, tile widths, buffer layout and strides."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...features import feature_width

# moments of the operators: P = Sum k v', S = Sum k k', C = Sum q v', R = Sum k q', W = Sum q q'
MOMENTS = {"linear_attention": "P", "hla2": "SC", "ahla": "PR", "hla3": "PSW", "polynomial": "PSCRW"}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_D, MAX_D = 16, 128


class Spec(NamedTuple):
    """Options of one two-sided call; the names of `hla_kernels.options.Options` plus the operator."""

    op: str
    feature_map: str | None = None
    normalize: bool = False
    center: str | None = None
    mean_path: bool = False
    ridge: float = 0.0
    scale: float | None = None
    eps: float = 1e-6
    q_scale: float = 1.0
    fixed: bool = False  # coefficients need no gradient

    def alone(self, dtype: torch.dtype) -> bool:
        """Whether a call is a ratio of first order, whose backward is `loops.first`: every token is read once a
        direction."""
        return self.of_keys() and self.normalize and dtype != torch.float32

    def of_softmax(self, d: int) -> tuple[Spec, int]:
        """Return the options and the number of features where features that are softmaxes of d channels are tokens."""
        if not self.softmax:
            return self, d
        return self._replace(feature_map=None), feature_width(d, self.feature_map)

    def of_keys(self) -> bool:
        """Whether the operator is one of keys and values alone, of tokens as they are."""
        return self.op == "linear_attention" and self.center is None and not self.mean_path

    def widths(self, d: int, dv: int) -> Widths:
        """Cut D and Dv into tiles of the same widths, which the wider one needs. With different ones, kernels spill, or
        a copy to shared memory overwrites what a product still reads. Only values as narrow as a tile can be (one
        number, repeated: a denominator) have a tile of their own, if keys are one tile and nothing else is summed."""
        if dv <= MIN_D and split_width(d)[1] == 0 and not self.sums and self.op != "polynomial":
            return Widths.of(d, dv)
        cut = split_width(max(d, dv))
        return Widths(Width(d, *cut), Width(dv, *cut))

    @property
    def softmax(self) -> bool:
        """Whether the features are softmaxes."""
        return self.feature_map in ("softmax", "softmax_pair")

    def in_range(self, n: int) -> Spec:
        """The same ratio with an operator of normal float16 numbers, whatever the scale: moments are means over `n`
        tokens."""
        if not self.normalize or self.op == "polynomial":
            return self
        up, order = 1 / (self.scale_of(n) * n), {"linear_attention": 1, "hla3": 3}.get(self.op, 2)
        scale = None if self.scale is None else 1 / n
        return self._replace(scale=scale, q_scale=1.0, ridge=self.ridge * up, eps=self.eps * up**order)

    @property
    def sums(self) -> bool:
        """Whether sums of tokens are needed in addition to the moments."""
        return self.normalize or self.mean_path or self.center is not None

    @property
    def of_differences(self) -> bool:
        """Whether the operator is zero for a single token, which differs from the mean of its sequence by nothing."""
        ridge = self.op == "hla2" and self.ridge != 0.0 and self.center == "k"  # lambda I C, which is not centred
        return self.mean_path or (self.center is not None and not ridge)

    def scale_of(self, n: int) -> float:
        """s: q_scale / N by default; 0 of a single token where only what rounding leaves of it would be scaled."""
        if n == 1 and self.of_differences:
            return 0.0
        return self.q_scale / n if self.scale is None else self.scale

    def scales(self, n: Tensor) -> Tensor:
        """Return `scale_of` for tensors of numbers of tokens."""
        s = self.q_scale / n if self.scale is None else torch.full_like(n, self.scale)
        return s * (n > 1) if self.of_differences else s


def unsupported(q: Tensor, k: Tensor, v: Tensor, d: int) -> str | None:
    """Return the reason why no kernel reads tokens of such dtypes, widths (`d` features) and strides, or None."""
    if q.dtype not in DTYPES:
        return f"there is no Triton form in {q.dtype}"
    for name, width in (("D", d), ("Dv", v.shape[3])):
        if not MIN_D <= width <= MAX_D:
            return f"{name} = {width} is outside {MIN_D}..{MAX_D}"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(3) != 1:
            return f"the last dimension of {name} is not contiguous"
    return None


def operator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the operators of tokens in memory: float16 ones are cast where they are used, in units of a
    power of two (`algebra.cast_operator`)."""
    return torch.float32 if dtype == torch.float16 else dtype


def padded(d: int) -> int:
    """Return the size of an axis of a tile, a power of two."""
    return max(16, 1 << (d - 1).bit_length())


def split_width(d: int, first: int = 64) -> tuple[int, int]:
    """D = D1 + D2 with both powers of two, the least padded columns: 72 = 64 + 16, 96 = 64 + 32, 112 -> 128. Up to
    `first` they are one tile: 40 channels as 32 + 16 would take more registers than they save."""
    whole = padded(d)
    half = whole // 2
    if d <= first:
        return whole, 0
    rest = padded(d - half)
    return (half, rest) if rest < half else (whole, 0)


class Width(NamedTuple):
    """D columns in tiles of D1 and D2 (`split_width`), a constexpr argument."""

    D: int
    D1: int
    D2: int

    @property
    def padded(self) -> int:
        """Columns of both tiles."""
        return self.D1 + self.D2


class Widths(NamedTuple):
    """Widths of queries and keys (F) and of values (V)."""

    F: Width
    V: Width

    @classmethod
    def of(cls, d: int, dv: int) -> Widths:
        """Split D and Dv."""
        return cls(Width(d, *split_width(d)), Width(dv, *split_width(dv)))

    @property
    def wide(self) -> int:
        """Columns of the wider tiles."""
        return max(self.F.padded, self.V.padded)


class Layout(NamedTuple):
    """Offsets in a head's float32 state, a constexpr argument. The weights WP', WS, WC', WR', WW have the offsets of
    the moments. K, KW and KG: lengths of a head's state, weights, and dM' with sum g after room for F behind it, or of
    a ratio the gradient of m1."""

    P: int
    S: int
    C: int
    R: int
    W: int
    SUM_Q: int
    SUM_K: int
    SUM_V: int
    M1: int
    ROW: int  # the anchor plus the mean of v
    K: int
    KW: int
    KG: int
    fd: int
    dv: int

    def vectors(self) -> Layout:
        """Return the state without its moments."""
        names = ("SUM_Q", "SUM_K", "SUM_V", "M1", "ROW", "K")
        return self._replace(**{name: getattr(self, name) - self.SUM_Q for name in names})

    def floats(self, itemsize: int) -> int:
        """Length of one head's operator and state."""
        return self.matrix_floats(itemsize) + self.K

    def matrix_floats(self, itemsize: int) -> int:
        """Room of one operator [F, V] of tokens of `itemsize` bytes, in float32 and whole 16 bytes."""
        return -(-self.fd * self.dv * itemsize // 16) * 4


def layout(spec: Spec, w: Widths) -> Layout:
    """Sizes of the buffers of one head; only what the call writes takes room."""
    fd, dv = w.F.D, w.V.D
    ff, fv = fd * fd, fd * dv
    moments = [size * int(name in MOMENTS[spec.op]) for name, size in zip("PSCRW", (fv, ff, fv, ff, ff), strict=True)]
    # int: torch 2.11 cannot multiply a symbol by a bool
    sums = int(spec.sums)
    ones = int(spec.normalize)
    sizes = (*moments, fd * sums, fd * sums, dv * sums, fd * ones, dv * ones)
    starts = dict(zip(Layout._fields, (sum(sizes[:i]) for i in range(11)), strict=False))
    return Layout(**starts, KW=sum(moments), KG=fv + fd + dv, fd=fd, dv=dv)


def summed_factors(op: str) -> int:
    """Return the number of float16 moments whose product is the operator in `heads.summed`."""
    return 0 if op == "linear_attention" else len(MOMENTS[op])


def summed_floats(spec: Spec, w: Widths, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return the float32 numbers per head that a forward of `heads.summed` saves: units, vectors, operator, factors."""
    lay = layout(spec, w)
    return 4, lay.vectors().K, lay.matrix_floats(dtype.itemsize), summed_factors(spec.op) * w.F.padded**2 // 2


def alignment(*tensors: Tensor) -> int:
    """The number of elements, at most 16 bytes, that divides every stride and start of a row: loads are that wide."""
    size = tensors[0].element_size()
    units = 16 // size
    for x in tensors:
        for stride in (*x.stride()[:3], x.data_ptr() // size):
            units = math.gcd(units, stride)
    return units


def strides(x: Tensor, units: int) -> tuple[int, int, int]:
    """Return the (batch, token, head) strides in `units` elements. Batch and head strides are given as 2 s + 1, since
    Triton would recompile for multiples of 16 in a tuple."""
    return 2 * (x.stride(0) // units) + 1, x.stride(1) // units, 2 * (x.stride(2) // units) + 1


def placed(*tensors: Tensor | None) -> tuple[tuple[tuple[int, int, int], ...], int]:
    """Return the strides of each tensor (ones for None) in units of the common alignment, and the alignment."""
    a = alignment(*(x for x in tensors if x is not None))
    return tuple((1, 1, 1) if x is None else strides(x, a) for x in tensors), a
