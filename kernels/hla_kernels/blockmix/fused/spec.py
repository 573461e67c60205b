"""What a block-mixing launch needs to know besides its tensors: what it can run, geometry, buffers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...hla.fused.spec import DTYPES, FEATURE_MAPS, MAX_D, MIN_D, split_width
from ..layout import Layout
from ..options import BlockOptions

MAPS = (None, "identity", "relu", "elu1", "softmax")
MAX_BLOCKS = 1024
# of `by_pairs`. On an H200, forward and backward, pairs took 0.8 of the time of blocks at N^2 / (M D) = 32 with 128
# channels and 1.3 of it at 40 with 64
PAIR_BLOCKS, PAIR_RATE = 64, 20
MAX_TOKENS = 2**20  # of a block: places in it are divided in float32


def why_not(q: Tensor, k: Tensor, v: Tensor, o: BlockOptions, rotary: object) -> str | None:
    """The reason why the Triton form cannot run this call, or None."""
    if q.dtype not in DTYPES:
        return f"there is no Triton form in {q.dtype}"
    if o.causal:
        return "causal calls have no Triton form"
    if rotary is not None and o.normalize and o.order != "la":
        return f"rotary tables with a ratio of order {o.order!r} have no Triton form: it has moments of its own"
    if rotary is not None and o.rotary_half and q.shape[3] & (q.shape[3] - 1):
        return f"rotary_half with D = {q.shape[3]}, which is no power of two, has no Triton form"
    if o.feature_map not in MAPS:
        return f"feature_map {o.feature_map!r} has no Triton form: its features are two of a channel"
    if o.feature_map == "softmax" and o.order != "la":
        return f"feature_map 'softmax' of order {o.order!r} has no Triton form"
    if len(o.layout.grid) > 3:
        return f"a grid of {len(o.layout.grid)} axes"
    if o.layout.n_blocks > MAX_BLOCKS:
        return f"{o.layout.n_blocks} blocks are more than {MAX_BLOCKS}"
    if o.layout.widest > MAX_TOKENS:
        return f"a block of {o.layout.widest} tokens is more than {MAX_TOKENS}"
    for name, d in (("D", q.shape[3]), ("Dv", v.shape[3])):
        if not MIN_D <= d <= MAX_D:
            return f"{name} = {d} is outside {MIN_D}..{MAX_D}"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(3) != 1:
            return f"the last dimension of {name} is not contiguous"
    return None


def by_pairs(q: Tensor, v: Tensor, o: BlockOptions, turned: bool) -> bool:
    """Whether a call goes by pairs of tokens: few of them, in blocks so small that their moments cost more."""
    n, m = o.layout.n_tokens, o.layout.n_blocks
    plain = o.order == "la" and not turned and q.dtype == torch.bfloat16 and o.moments == "bfloat16"
    return plain and m <= PAIR_BLOCKS and n * n <= PAIR_RATE * m * max(q.shape[3], v.shape[3])


def geometry(layout: Layout) -> tuple[int, ...]:
    """GEO of `geometry`: prefix, three lengths, three numbers of blocks."""
    ones = (1,) * (3 - len(layout.grid))
    return (layout.prefix, *ones, *layout.grid, *ones, *layout.blocks)


def widths(d: int, dv: int) -> dict[str, int]:
    """The constexpr widths every kernel takes."""
    (f1, f2), (v1, v2) = split_width(d), split_width(dv)
    return {"D": d, "F1": f1, "F2": f2, "DV": dv, "V1": v1, "V2": v2}


def flags(o: BlockOptions, rotary: object) -> dict[str, int]:
    """The constexpr flags of the passes over tokens."""
    turn = 0 if rotary is None else 1 + o.rotary_half
    return {"NORM": o.normalize, "FMAP": FEATURE_MAPS[o.feature_map], "TURN": turn, "EXACT": o.moments == "float32"}


def moments_dtype(dtype: torch.dtype, o: BlockOptions, turned: bool) -> torch.dtype:
    """Moments of bfloat16 tokens may be rounded to bfloat16: products round them anyway, and they are moved five times.
    Not those of a product of two, which is rounded itself, nor of a ratio of elu + 1 whose features are not turned, nor
    of a softmax: their gradients are small beside them."""
    cancels = o.feature_map == "softmax" or (o.feature_map == "elu1" and o.normalize and not turned)
    rounded = dtype == torch.bfloat16 and o.moments == "bfloat16" and o.order == "la" and not cancels
    return torch.bfloat16 if rounded else torch.float32


def precision(dtype: torch.dtype, o: BlockOptions) -> str:
    """Of products of tokens: sums of tiles in float32 ("ieee") where the result is to be as exact as that."""
    return "ieee" if dtype == torch.float32 or o.moments == "float32" else "tf32x3"


def moment_precisions(dtype: torch.dtype, o: BlockOptions) -> tuple[str, str]:
    """Of the mixing of float32 moments, and of products of two of them: tf32 is enough where the result is rounded to
    bfloat16, since what it rounds is summed over blocks and features, unless most of the sum cancels."""
    rounded = dtype == torch.bfloat16 and o.moments == "bfloat16" and o.feature_map != "softmax"
    return ("tf32", "tf32") if rounded else ("tf32x3", "ieee")


class Sizes(NamedTuple):
    """Floats of one (batch, head) in a buffer of moments: of each block a matrix, a vector (of the ratio) and the left
    factor of a higher order; the anchor, 1 / den of each token."""

    matrix: int
    vector: int
    left: int
    anchor: int
    inverses: int | torch.SymInt

    @classmethod
    def of(cls, o: BlockOptions, n: int | torch.SymInt, d: int, dv: int, dtype: torch.dtype) -> Sizes:
        """Whole 16 bytes each; dtype: that of moments."""
        m, size = o.layout.n_blocks, dtype.itemsize
        vectors, lefts = o.normalize * 1, (o.order != "la") * 1
        tokens = n if o.normalize else 0
        return cls(
            -(-m * d * dv * size // 16) * 4, -(-m * d // 4) * 4 * vectors, -(-m * d * d // 4) * 4 * lefts,
            -(-dv // 4) * 4 * vectors, tokens,
        )  # fmt: skip

    @property
    def moments(self) -> int:
        """Of one set of moments."""
        return self.matrix + self.vector + self.left

    @property
    def saved(self) -> int | torch.SymInt:
        """Local and mixed moments, the anchor, 1 / den."""
        return 2 * self.moments + self.anchor + self.inverses


class Moments(NamedTuple):
    """Of every block: matrices [M, B * H, V, F] (P', C', an operator); for the ratio vectors [M, B * H, F] in float32;
    of a higher order the left factors [M, B * H, F, F] (R', S)."""

    matrix: Tensor
    vector: Tensor | None
    left: Tensor | None

    @classmethod
    def of(cls, buffer: Tensor, heads: int, size: Sizes, dtype: torch.dtype) -> Moments:
        """The first `heads * size.moments` floats of a buffer."""
        matrix, vector, left = buffer[: heads * size.moments].split([heads * x for x in size[:3]])
        return cls(matrix.view(dtype), vector if size.vector else None, left if size.left else None)

    def columns(self, d: int, dv: int) -> list[tuple[Tensor, int]]:
        """Each of them with its numbers per block and head."""
        sizes = zip(self, (d * dv, d, d * d), strict=True)
        return [(x, c) for x, c in sizes if x is not None]
