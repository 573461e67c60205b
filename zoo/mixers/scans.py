"""Orders in which causal mixers read the tokens of a grid."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.mixers.context import Context

SCAN_ORDERS = ("raster", "alternate", "heads", "both")


class Order(NamedTuple):
    """A permutation of the tokens and its inverse, [N] int64 each."""

    tokens: Tensor
    inverse: Tensor

    def there(self, x: Tensor) -> Tensor:
        """Tokens [B, N, ..] in this order."""
        return x[:, self.tokens]

    def back(self, x: Tensor) -> Tensor:
        """Inverse of `there`."""
        return x[:, self.inverse]


def directions(ctx: Context, n_tokens: int, device: torch.device) -> list[Order]:
    """Forward, backward, forward by columns, backward by columns.

    By columns: the last two axes of the grid are exchanged; without a grid it is forward again. Every order begins with
    the suffix (text) tokens and ends with the prefix (class, register) tokens, so that text reaches the patches and the
    patches reach the class token.
    """
    first = torch.arange(ctx.prefix, device=device)
    grid = torch.arange(ctx.prefix, n_tokens - ctx.suffix, device=device)
    last = torch.arange(n_tokens - ctx.suffix, n_tokens, device=device)
    columns = grid
    if ctx.grid is not None and len(ctx.grid) > 1 and math.prod(ctx.grid) == len(grid):
        columns = grid.view(*ctx.grid).transpose(-2, -1).flatten()
    found = []
    for patches in (grid, grid.flip(0), columns, columns.flip(0)):
        tokens = torch.cat([last, patches, first])
        found.append(Order(tokens, tokens.argsort()))
    return found
