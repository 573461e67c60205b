"""Supported calls, geometry, flags and buffer sizes of the Triton form."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...hla.fused.spec import Width, Widths, padded, unsupported
from ..layout import BlockOptions

Size = int | torch.SymInt
MAX_BLOCKS = 1024
# limits of `by_pairs`. On an H200, 256 tokens in 16 blocks with 64 channels took 0.4 of the time of moments by pairs
PAIR_BLOCKS, PAIR_RATE = 128, 150
MAX_TOKENS = 2**20  # per block, since positions in a block are divided in float32


def why_not(q: Tensor, k: Tensor, v: Tensor, o: BlockOptions, rotary: object) -> str | None:
    """Return the reason why the Triton form does not support this call, or None."""
    reason = unsupported(q, k, v, q.shape[3])
    if reason is not None:
        return reason
    if o.causal:
        return "causal calls have no Triton form"
    if rotary is not None and o.normalize and o.order != "la":
        return f"rotary tables with a ratio of order {o.order!r} have no Triton form: it has moments of its own"
    if rotary is not None and o.rotary_half and q.shape[3] & (q.shape[3] - 1):
        return f"rotary_half with D = {q.shape[3]}, which is no power of two, has no Triton form"
    if o.feature_map == "softmax_pair":
        return f"feature_map {o.feature_map!r} has no Triton form: its features are two of a channel"
    if o.feature_map == "softmax" and o.order != "la":
        return f"feature_map 'softmax' of order {o.order!r} has no Triton form"
    if len(o.layout.grid) > 3:
        return f"a grid of {len(o.layout.grid)} axes"
    if o.layout.n_blocks > MAX_BLOCKS:
        return f"{o.layout.n_blocks} blocks are more than {MAX_BLOCKS}"
    if o.layout.widest > MAX_TOKENS:
        return f"a block of {o.layout.widest} tokens is more than {MAX_TOKENS}"
    return None


def by_pairs(q: Tensor, v: Tensor, o: BlockOptions, turned: bool) -> bool:
    """Whether a call runs by pairs of tokens: few tokens, for which moments cost more."""
    plain = o.order == "la" and not turned and o.moments == "bfloat16"
    d, m = max(q.shape[3], v.shape[3]), o.layout.n_blocks
    few = m <= PAIR_BLOCKS and o.layout.n_tokens**2 * padded(d) <= PAIR_RATE * m * d * d
    return plain and few and q.dtype == torch.bfloat16


def moments_dtype(dtype: torch.dtype, o: BlockOptions, turned: bool) -> torch.dtype:
    """Return the dtype of stored moments.

    Moments of bfloat16 tokens may be rounded to bfloat16: products round them anyway, and they are moved five times.
    Exceptions are higher orders, whose products are rounded, and ratios of elu + 1 without rotation and softmax
    features, whose gradients are small compared with the moments.
    """
    cancels = o.feature_map == "softmax" or (o.feature_map == "elu1" and o.normalize and not turned)
    rounded = dtype == torch.bfloat16 and o.moments == "bfloat16" and o.order == "la" and not cancels
    return torch.bfloat16 if rounded else torch.float32


def precision(dtype: torch.dtype, o: BlockOptions) -> str:
    """Return the precision of products of tokens: "ieee" (tiles summed in float32) if the result must be accurate to
    float32."""
    return "ieee" if dtype == torch.float32 or o.moments == "float32" else "tf32x3"


def moment_precisions(dtype: torch.dtype, o: BlockOptions) -> tuple[str, str]:
    """Return the precisions of the mixing of float32 moments and of products of two moments. tf32 is enough if the
    result is rounded to bfloat16, since errors average out over blocks and features, unless the sum cancels."""
    rounded = dtype == torch.bfloat16 and o.moments == "bfloat16" and o.feature_map != "softmax"
    return ("tf32", "tf32") if rounded else ("tf32x3", "ieee")


def widths(d: int, dv: int, turned: bool) -> Widths:
    """Cut D and Dv into tiles. With rotary tables (the last argument), kernels of tiles of 64 and 32 channels spill,
    and an assembler leaves an address unset: they have one tile of 128."""
    w = Widths.of(d, dv)
    return Widths(Width(d, 128, 0), Width(dv, 128, 0)) if turned and w.F.D2 > 16 else w


class Sizes(NamedTuple):
    """Floats in a buffer of moments: per block and head a matrix, a vector (for the ratio) and the left factor of a
    higher order; the anchor; and 1 / den per token. dtype: of the matrices."""

    matrix: Size
    vector: Size
    left: Size
    anchor: Size
    inverses: Size
    dtype: torch.dtype

    @classmethod
    def of(cls, q: Tensor, v: Tensor, o: BlockOptions, turned: bool) -> Sizes:
        """Return the sizes, multiples of 16 bytes per head."""
        (b, n, h, d), dv, m = q.shape, v.shape[3], o.layout.n_blocks
        heads, vectors, lefts = b * h, int(o.normalize), int(o.order != "la")
        dtype = moments_dtype(q.dtype, o, turned)
        return cls(
            heads * -(-m * d * dv * dtype.itemsize // 16) * 4, heads * -(-m * d // 4) * 4 * vectors,
            heads * -(-m * d * d // 4) * 4 * lefts, heads * -(-dv // 4) * 4 * vectors, heads * n * vectors, dtype,
        )  # fmt: skip

    def operators(self) -> Sizes:
        """Return the sizes of operators and their gradients, which have no left factors."""
        return self._replace(left=0)

    @property
    def moments(self) -> Size:
        """Return the floats of one set of moments."""
        return self.matrix + self.vector + self.left

    @property
    def saved(self) -> Size:
        """Return the floats of local and mixed moments, the anchor and 1 / den."""
        return 2 * self.moments + self.anchor + self.inverses


class Moments(NamedTuple):
    """Moments of all blocks: matrices [M, B * H, V, F] (P', C', an operator); for the ratio vectors [M, B * H, F] in
    float32; for higher orders left factors [M, B * H, F, F] (R', S)."""

    matrix: Tensor
    vector: Tensor | None
    left: Tensor | None

    @classmethod
    def of(cls, buffer: Tensor, size: Sizes) -> Moments:
        """View the first `size.moments` floats of a buffer as moments."""
        matrix, vector, left = buffer[: size.moments].split(size[:3])
        return cls(matrix.view(size.dtype), vector if size.vector else None, left if size.left else None)

    def columns(self, d: int, dv: int) -> list[tuple[Tensor, int]]:
        """Return each tensor with its number of values per block and head."""
        sizes = zip(self, (d * dv, d, d * d), strict=True)
        return [(x, c) for x, c in sizes if x is not None]


class Saved(NamedTuple):
    """Tensors saved for the backward: local and mixed moments and, for the ratio, the anchor [B * H, V] and 1 / den
    [B * H, N]."""

    local: Moments
    mixed: Moments
    anchor: Tensor | None
    inverses: Tensor | None

    @classmethod
    def of(cls, buffer: Tensor, size: Sizes) -> Saved:
        """View a buffer of `size.saved` floats."""
        local, mixed, *ratio = buffer.split([size.moments, size.moments, size.anchor, size.inverses])
        anchor, inverses = ratio if size.vector else (None, None)
        return cls(Moments.of(local, size), Moments.of(mixed, size), anchor, inverses)
