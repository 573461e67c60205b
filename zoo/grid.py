"""The token grid: where the patch tokens of a sequence lie, and which tokens are not patches.

A sequence of N = prefix + prod(grid) + suffix tokens is `prefix` tokens (class, register or leading text tokens), then
the patches of a grid (H, W) or (T, H, W) in raster order (last axis fastest), then `suffix` tokens (trailing text).
"""

import math

from torch import Tensor

Grid = tuple[int, ...]


def check_grid(n_tokens: int, grid: Grid, prefix: int = 0, suffix: int = 0) -> None:
    """Raise ValueError unless `prefix + prod(grid) + suffix` equals the number of tokens."""
    expected = prefix + math.prod(grid) + suffix
    if n_tokens != expected:
        shape = " x ".join(map(str, grid))
        raise ValueError(
            f"the grid {shape} with {prefix} prefix and {suffix} suffix tokens needs {expected} tokens, got {n_tokens}"
        )


def split_tokens(x: Tensor, grid: Grid, prefix: int = 0, suffix: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Views of [B, N, ...] as (prefix tokens, patch tokens, suffix tokens) along the token axis.

    Raises ValueError when the grid does not match N.
    """
    check_grid(x.shape[1], grid, prefix, suffix)
    n = math.prod(grid)
    return x[:, :prefix], x[:, prefix : prefix + n], x[:, prefix + n :]
