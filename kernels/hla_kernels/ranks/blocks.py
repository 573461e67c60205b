"""Block mixing: moments of all blocks are added over the ranks. A block may be split between two ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..blockmix.call import BlockCall, check_rotary, prepare
from ..blockmix.causal import mix
from ..blockmix.layout import Layout, block_table
from ..blockmix.options import BlockOptions
from ..blockmix.torch_form import block_moments, numerator, prepare_heads, product
from ..checks import check_tensors
from ..hla.layout import to_tokens
from ..options import autocast_dtype, plain_precision
from .collectives import add_together, one_token, token_counts


def mix_blocks(
    q: Tensor, k: Tensor, v: Tensor, group: Any, *, mixing: Tensor, rotary: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Return o [B, N, H, Dv] of this rank's tokens (`hla_kernels.mhla`). Raises ValueError for a causal call."""
    one, two, three = one_token(q, k, v)
    check_tensors(one, two, three, autocast_dtype(q) is not None)
    counts = token_counts(q.shape[1], group, q.device)
    start = sum(counts[: dist.get_rank(group)])
    call = _prepare(q, k, v, mixing, sum(counts), options)
    if rotary is not None:
        check_rotary(rotary, q)
    if call.options.causal:
        raise ValueError("tokens spread over ranks have no causal mhla, which orders the tokens inside a block.")
    layout, opt = call.options.layout, call.options
    if opt.scale is None:
        opt = opt._replace(scale=layout.n_blocks / layout.n_tokens)  # of all tokens, not of this rank's
    share = Share(layout, start, q.shape[1], q.device)
    with plain_precision(call.q):
        p = prepare_heads(call.q, call.k, call.v, mixing, opt, None, rotary)
        y, total = numerator(p, None, opt, functools.partial(share.weigh, group))
    return to_tokens(y if total is None else y / total, call.q.dtype)


def _prepare(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, n: int, options: dict[str, Any]) -> BlockCall:
    """Check a call as one with the tokens of all ranks."""
    one, two, three = (x.new_zeros(1, 1, 1, 1).expand(x.shape[0], n, *x.shape[2:]) for x in (q, k, v))
    call = prepare(one, two, three, mixing, dtype=autocast_dtype(q), **options)
    q, k, v = (x.to(checked.dtype) for x, checked in zip((q, k, v), (call.q, call.k, call.v), strict=True))
    return call._replace(q=q, k=k, v=v)


class Share:
    """Blocks that contain tokens of one rank, the `n` tokens from `start` on. Blocks are padded with zeros."""

    def __init__(self, layout: Layout, start: int, n: int, device: torch.device) -> None:
        self.n_blocks = layout.n_blocks
        self.blocks, self.tokens, self.places = _tables(layout, start, n, device)

    def weigh(self, group: Any, q: Tensor, k: Tensor, v: Tensor, m: Tensor, s: float, options: BlockOptions) -> Tensor:
        """Return W v [B, Hk, G, N, E] for features q, k and values v of this rank, without the denominator."""
        q, k, v = (F.pad(x, (0, 0, 0, 1))[..., self.tokens, :] for x in (q, k, v))
        own = [self._in_all(x) for x in block_moments(q, k, v, s, options.order)]
        rows = m[..., self.blocks, :]
        y = product(q, [mix(x, rows) for x in add_together(own, group)])
        return y.flatten(-3, -2)[..., self.places, :]

    def _in_all(self, x: Tensor) -> Tensor:
        """Pad moments [.., blocks of this rank, F, E] with zeros to all blocks."""
        return x.new_zeros(*x.shape[:-3], self.n_blocks, *x.shape[-2:]).index_copy(-3, self.blocks, x)


@functools.lru_cache(maxsize=64)
def _tables(layout: Layout, start: int, n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the blocks of a share int64 [M'], the tokens of each [M', W] (n in unused slots), and the slot of each
    token [n]."""
    table = block_table(layout).tolist()[start : start + n]
    slots: dict[int, list[int]] = {block: [] for block in sorted(set(table))}
    for token, block in enumerate(table):
        slots[block].append(token)
    width = max(map(len, slots.values()), default=1)
    places = [0] * n
    for row, tokens in enumerate(slots.values()):
        for column, token in enumerate(tokens):
            places[token] = row * width + column
    padded = [tokens + [n] * (width - len(tokens)) for tokens in slots.values()]
    with torch.inference_mode(False):  # the cached tables must be usable with autograd
        blocks, held, found = (torch.tensor(x, dtype=torch.int64, device=device) for x in (list(slots), padded, places))
        return blocks, held.view(len(padded), width), found
