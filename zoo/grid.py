"""Token grid: layout of the patch tokens in a sequence.

A sequence of N = prefix + prod(grid) + suffix tokens consists of `prefix` tokens (class, register or leading text
tokens), the patches of a grid (H, W) or (T, H, W) in raster order (last axis fastest), and `suffix` tokens (trailing
text).
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

Grid = tuple[int, ...]


def integers(sizes: Iterable[int]) -> Grid:
    """Return sizes as a grid of integers, also under torch.jit.trace, where the sizes of a tensor are tensors."""
    return tuple(map(int, sizes)) if torch.jit.is_tracing() else tuple(sizes)


def check_grid(n_tokens: int, grid: Grid, prefix: int = 0, suffix: int = 0) -> None:
    """Raise ValueError unless `prefix + prod(grid) + suffix` equals the number of tokens."""
    expected = prefix + math.prod(grid) + suffix
    if n_tokens != expected:
        shape = " x ".join(map(str, grid))
        raise ValueError(
            f"the grid {shape} with {prefix} prefix and {suffix} suffix tokens needs {expected} tokens, got {n_tokens}"
        )


def split_tokens(x: Tensor, grid: Grid, prefix: int = 0, suffix: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Split [B, N, ...] into views (prefix tokens, patch tokens, suffix tokens).

    Raises ValueError if the grid does not match N.
    """
    check_grid(x.shape[1], grid, prefix, suffix)
    n = math.prod(grid)
    return x[:, :prefix], x[:, prefix : prefix + n], x[:, prefix + n :]


def join_tokens(first: Tensor, patches: Tensor, last: Tensor) -> Tensor:
    """Undo `split_tokens`, without a copy if there are patches only."""
    return torch.cat([first, patches, last], 1) if first.shape[1] or last.shape[1] else patches
