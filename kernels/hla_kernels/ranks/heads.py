"""Exchange of heads: each rank gets all tokens of some heads (Ulysses, arXiv 2309.14509)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import cast_tensors
from ..options import cast
from .collectives import exchange, one_token, token_counts


def by_heads(run: Callable[..., Any], op: str, q: Tensor, k: Tensor, v: Tensor, group: Any, **options: Any) -> Tensor:
    """Return o [B, N, H, Dv] of this rank's tokens from `run(op, (q, k, v), **options)`, called with all tokens
    of some heads.

    Options with one value per head (a decay [H] or [Hk]) are cut like the heads. Raises ValueError for fewer key heads
    than ranks.
    """
    cast_tensors(*one_token(q, k, v))
    q, k, v = cast(q, k, v)
    ranks, rank, heads = dist.get_world_size(group), dist.get_rank(group), k.shape[2]
    if heads < ranks:
        raise ValueError(
            f"{ranks} ranks cannot share {heads} key heads, which this operator exchanges; use fewer ranks."
        )
    counts = token_counts(q.shape[1], group, q.device).tolist()
    borders = [heads * i // ranks for i in range(ranks + 1)]
    cuts = list(pairwise(borders))
    tokens = [x.unflatten(2, (heads, -1)) for x in (q, k, v)]  # [B, N, Hk, G or 1, D]
    first, last = cuts[rank]
    mine = _Shares([(x.shape[0], last - first, *x.shape[3:]) for x in tokens], counts)
    sent = [torch.cat([x[:, :, a:b].flatten() for x in tokens]) for a, b in cuts]
    q, k, v = (x.flatten(2, 3) for x in mine.join(exchange(sent, mine.sizes, group)))
    decay = options.get("decay")
    if isinstance(decay, Tensor):
        options["decay"] = decay.unflatten(0, (heads, -1))[first:last].flatten()
    o = run(op, (q, k, v), **options).unflatten(2, (last - first, -1))
    back = [(o.shape[0], counts[rank], b - a, *o.shape[3:]) for a, b in cuts]
    pieces = exchange([x.flatten() for x in o.split(counts, 1)], [torch.Size(s).numel() for s in back], group)
    return torch.cat([x.view(shape) for x, shape in zip(pieces, back, strict=True)], 2).flatten(2, 3)


class _Shares:
    """Flat pieces that hold the tokens of one rank each, for several tensors; shapes: [B, Hk, G, D] without tokens."""

    def __init__(self, shapes: list[tuple[int, ...]], counts: list[int]) -> None:
        self.shapes = [[(b, n, *rest) for b, *rest in shapes] for n in counts]

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each piece."""
        return [sum(torch.Size(s).numel() for s in shapes) for shapes in self.shapes]

    def join(self, pieces: list[Tensor]) -> list[Tensor]:
        """Return the tensors with the tokens of all ranks."""
        parts = []
        for piece, shapes in zip(pieces, self.shapes, strict=True):
            flat = piece.split([torch.Size(s).numel() for s in shapes])
            parts.append([x.view(s) for x, s in zip(flat, shapes, strict=True)])
        return [torch.cat(list(x), 1) for x in zip(*parts, strict=True)]
