"""Orders in which causal mixers read the tokens of a grid."""

from typing import NamedTuple

from torch import Tensor

from zoo.grid import Grid, join_tokens
from zoo.mixers.context import Context

SCAN_ORDERS = ("raster", "alternate", "heads", "both", "frame")
DIRECTIONS = 4


class Order(NamedTuple):
    """An order of tokens: suffix (text) tokens, patches in a direction, then prefix (class, register) tokens.

    This way text reaches the patches, and the patches reach the class token. Directions: 0 forward, 1 backward, 2
    forward by columns, 3 backward by columns, where the last two axes of the grid are exchanged.
    """

    direction: int
    ctx: Context

    def permute(self, x: Tensor) -> Tensor:
        """Reorder tokens [B, N, ..]."""
        end = x.shape[1] - self.ctx.suffix
        first, patches, last = x[:, : self.ctx.prefix], x[:, self.ctx.prefix : end], x[:, end:]
        patches = self._turned(patches, self.ctx.grid)
        return join_tokens(last, patches.flip(1) if self.direction % 2 else patches, first)

    def unpermute(self, x: Tensor) -> Tensor:
        """Undo `permute`."""
        end = x.shape[1] - self.ctx.prefix
        last, patches, first = x[:, : self.ctx.suffix], x[:, self.ctx.suffix : end], x[:, end:]
        patches = patches.flip(1) if self.direction % 2 else patches
        return join_tokens(first, self._turned(patches, self.ctx.grid and _exchanged(self.ctx.grid)), last)

    def _turned(self, patches: Tensor, grid: Grid | None) -> Tensor:
        """Exchange the last two axes of the grid of patches [B, n, ..]."""
        if self.direction < 2:
            return patches
        assert grid is not None  # `DeltaOptions.needs_grid`
        dims = len(grid)
        return patches.unflatten(1, grid).transpose(dims - 1, dims).flatten(1, dims)


def _exchanged(grid: Grid) -> Grid:
    return *grid[:-2], grid[-1], grid[-2]
