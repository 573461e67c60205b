"""Orders in which causal mixers read the tokens of a grid."""

from typing import NamedTuple

import torch
from torch import Tensor

from zoo.mixers.context import Context

SCAN_ORDERS = ("raster", "alternate", "heads", "both", "frame")
DIRECTIONS = 4


class Order(NamedTuple):
    """A permutation of the tokens and its inverse, [N] int64 each."""

    tokens: Tensor
    inverse: Tensor

    def permute(self, x: Tensor) -> Tensor:
        """Reorder tokens [B, N, ..]."""
        return x[:, self.tokens]

    def unpermute(self, x: Tensor) -> Tensor:
        """Undo `permute`."""
        return x[:, self.inverse]


def order_of(direction: int, ctx: Context, n_tokens: int, device: torch.device) -> Order:
    """Return the order of a direction: 0 forward, 1 backward, 2 forward by columns, 3 backward by columns.

    By columns: the last two axes of the grid are exchanged. Every order begins with the suffix (text) tokens and ends
    with the prefix (class, register) tokens, so that text reaches the patches and the patches reach the class token.
    """
    first = torch.arange(ctx.prefix, device=device)
    patches = torch.arange(ctx.prefix, n_tokens - ctx.suffix, device=device)
    last = torch.arange(n_tokens - ctx.suffix, n_tokens, device=device)
    if direction >= 2:
        assert ctx.grid is not None  # `DeltaOptions.needs_grid`
        patches = patches.view(*ctx.grid).transpose(-2, -1).flatten()
    if direction % 2:
        patches = patches.flip(0)
    tokens = torch.cat([last, patches, first])
    return Order(tokens, tokens.argsort())
