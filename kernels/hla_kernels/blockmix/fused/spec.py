"""What a block-mixing launch needs to know besides its tensors: what it can run, geometry, buffers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...hla.fused.spec import FEATURE_MAPS, MAX_D, MIN_D, split_width
from ..layout import Layout
from ..options import BlockOptions

MAPS = (None, "identity", "relu")
INEXACT = "the errors of its Triton form are not within twice those of the torch form"
MAX_BLOCKS = 256
MAX_TOKENS = 2**20  # of a block: places in it are divided in float32


def why_not(q: Tensor, k: Tensor, v: Tensor, o: BlockOptions, rotary: object) -> str | None:
    """The reason why the Triton form cannot run this call, or None."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {q.dtype}: {INEXACT}"
    if o.order != "la":
        return f"order {o.order!r} has no Triton form yet"
    if o.causal:
        return "causal calls have no Triton form"
    if rotary is not None:
        return "rotary tables have no Triton form yet"
    if o.feature_map not in MAPS:
        return f"feature_map {o.feature_map!r}: {INEXACT}"
    if k.shape[2] != q.shape[2]:
        return "several query heads share a key head"
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


def geometry(layout: Layout) -> tuple[int, ...]:
    """GEO of `geometry`: prefix, three lengths, three numbers of blocks."""
    ones = (1,) * (3 - len(layout.grid))
    return (layout.prefix, *ones, *layout.grid, *ones, *layout.blocks)


def widths(d: int, dv: int) -> dict[str, int]:
    """The constexpr widths every kernel takes."""
    (f1, f2), (v1, v2) = split_width(d), split_width(dv)
    return {"D": d, "F1": f1, "F2": f2, "DV": dv, "V1": v1, "V2": v2}


def flags(o: BlockOptions) -> dict[str, int]:
    """The constexpr flags of the passes over tokens."""
    return {"NORM": o.normalize, "FMAP": FEATURE_MAPS[o.feature_map]}


def moments_dtype(dtype: torch.dtype) -> torch.dtype:
    """Moments of bfloat16 tokens are rounded to bfloat16: products round them anyway, and they are moved five times."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


class Sizes(NamedTuple):
    """Floats of one (batch, head) in a buffer of moments: a matrix of each block, a vector of each block, the anchor,
    1 / den of each token."""

    matrix: int
    vector: int
    anchor: int
    inverses: int | torch.SymInt

    @classmethod
    def of(cls, o: BlockOptions, n: int | torch.SymInt, d: int, dv: int, dtype: torch.dtype) -> Sizes:
        """Whole 16 bytes each."""
        m, size = o.layout.n_blocks, moments_dtype(dtype).itemsize
        vectors = o.normalize * 1
        tokens = n if o.normalize else 0
        return cls(-(-m * d * dv * size // 16) * 4, -(-m * d // 4) * 4 * vectors, -(-dv // 4) * 4 * vectors, tokens)

    @property
    def saved(self) -> int | torch.SymInt:
        """Local and mixed moments, the anchor, 1 / den."""
        return 2 * (self.matrix + self.vector) + self.anchor + self.inverses


class Moments(NamedTuple):
    """Matrices [M, B * H, V, F] and, for the ratio, vectors [M, B * H, F] float32 of every block."""

    matrix: Tensor
    vector: Tensor | None

    @classmethod
    def of(cls, buffer: Tensor, heads: int, size: Sizes, dtype: torch.dtype) -> Moments:
        """The first `heads * (matrix + vector)` floats of a buffer."""
        cut = heads * size.matrix
        vector = buffer[cut : cut + heads * size.vector] if size.vector else None
        return cls(buffer[:cut].view(dtype), vector)
