"""FlexAttention peer of the adaptive multipole operator, forward only.

Tokens are copied to tile order. One call attends to the selected key tiles with a block mask, a second one to the
pooled keys; the results are merged by their log denominators. Tiles are selected by mean queries and the first-order
term is omitted, which both make the peer cheaper.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from hla_kernels.softmax.adaptive.layout import Field, tokens_of
from hla_kernels.softmax.adaptive.pooling import Pooled
from hla_kernels.softmax.adaptive.routing import highest, scores
from hla_kernels.softmax.adaptive.torch_form import keys_of, rows, slots
from hla_kernels.softmax.attention import Heads


def adaptive(
    q: Tensor, k: Tensor, v: Tensor, *, grid: tuple[int, ...], density: float, q_tile: int, k_tile: int,
    attention: Callable[..., Any] = flex_attention,
) -> Tensor:  # fmt: skip
    """Compute o [B, N, H, D] of q, k, v [B, N, H, D] with select="mean", far="mean" and scale D^-1/2.

    attention: `flex_attention` or its compiled form; only the latter is sparse.
    """
    field, scale = Field(grid, 0, 0, q_tile, k_tile), q.shape[-1] ** -0.5
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    x = Heads(q * scale, k, v, None)
    table = _table(field, q.device)
    tiles, keys = rows(x.q, table), keys_of(x, field)
    live = slots(x, table)
    with torch.no_grad():
        chosen = highest(scores(tiles, live[..., None], keys.pooled, "mean"), keys.pooled.n, field.exact(density))
        block_mask, is_chosen = _block_mask(chosen, keys.live, field)
    exact, exact_lse = attention(
        tiles.flatten(2, 3), keys.k.flatten(2, 3), keys.v.flatten(2, 3), block_mask=block_mask, scale=1.0,
        return_lse=True,
    )  # fmt: skip
    far, far_lse = _far(tiles, keys.pooled, is_chosen, field, attention)
    total = torch.logaddexp(exact_lse, far_lse)[..., None]
    o = exact * (exact_lse[..., None] - total).exp() + far * (far_lse[..., None] - total).exp()
    return o[..., _places(field, q.device), :].transpose(1, 2).contiguous()


@functools.lru_cache(maxsize=8)
def _table(field: Field, device: torch.device) -> Tensor:
    return tokens_of(field, field.q_tile, device)


@functools.lru_cache(maxsize=8)
def _places(field: Field, device: torch.device) -> Tensor:
    """Return the slot of each token."""
    table = _table(field, device).flatten()
    found = torch.zeros(field.n_tokens + 1, dtype=torch.int64, device=device)
    return found.scatter(0, table, torch.arange(len(table), device=device))[:-1]


def _block_mask(chosen: Tensor, live: Tensor, field: Field) -> tuple[BlockMask, Tensor]:
    """Return (block mask of the exact tiles, the same as [B, H, U, T] bool)."""
    b, h, u, k = chosen.shape
    t = field.n_key_tiles
    is_chosen = torch.zeros(b, h, u, t, dtype=torch.bool, device=chosen.device).scatter(-1, chosen, True)
    real, q_tile, k_tile = live[0, 0].flatten(), field.q_tile, field.k_tile

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return is_chosen[b, h, i // q_tile, j // k_tile] & real[j]

    count = torch.full((b, h, u), k, dtype=torch.int32, device=chosen.device)
    indices = torch.zeros(b, h, u, t, dtype=torch.int32, device=chosen.device)
    indices[..., :k] = chosen.int()
    blocks = {"full_kv_num_blocks": count, "full_kv_indices": indices}  # compiled, these need no mask
    if t * k_tile > field.n_tokens:  # some slots are empty
        blocks = {"kv_num_blocks": count, "kv_indices": indices}
    none: dict[str, Any] = {"kv_num_blocks": torch.zeros_like(count), "kv_indices": indices}
    return BlockMask.from_kv_blocks(**none | blocks, BLOCK_SIZE=(q_tile, k_tile), mask_mod=mask), is_chosen


def _far(
    tiles: Tensor, x: Pooled, is_chosen: Tensor, field: Field, attention: Callable[..., Any]
) -> tuple[Tensor, Tensor]:
    """Return (o, log denominator) of the pooled keys of other tiles."""
    logn, q_tile = x.n[0, 0].log(), field.q_tile

    def of_size(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(is_chosen[b, h, i // q_tile, j], -math.inf, score + logn[j])

    return attention(tiles.flatten(2, 3), x.mean, x.value, score_mod=of_size, scale=1.0, return_lse=True)
