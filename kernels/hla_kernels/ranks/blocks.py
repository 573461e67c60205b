"""Block mixing: moments of all blocks are added over the ranks. A block may be split between two ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..blockmix.call import BlockCall, check_layout, check_rotary, prepare
from ..blockmix.causal import mix
from ..blockmix.layout import Layout, block_table, slots_of
from ..blockmix.options import BlockOptions
from ..blockmix.torch_form import block_moments, numerator, prepare_heads, product
from ..checks import cast_tensors
from ..features import feature
from ..hla.layout import to_tokens
from ..op import choose
from ..options import plain_precision
from .collectives import add_together, one_token, stage, token_counts

SEEN: set[tuple] = set()  # (layout, tokens of this rank, ranks) whose tokens were counted


def mix_blocks(
    q: Tensor, k: Tensor, v: Tensor, group: Any, *, mixing: Tensor, grid: Sequence[int], blocks: Sequence[int],
    prefix: int = 0, rotary: tuple[Tensor, Tensor] | None = None, impl: str = "auto", **options: Any,
) -> Tensor:  # fmt: skip
    """Return o [B, N, H, Dv] of this rank's tokens (`hla_kernels.mhla`). Raises ValueError for a causal call."""
    cast_tensors(*one_token(q, k, v))
    check_rotary(rotary, q)
    layout, counts = check_layout(grid, blocks, prefix), token_counts(q.shape[1], group, q.device)
    form = (layout, q.shape[1], len(counts))
    n = layout.n_tokens if form in SEEN else int(counts.sum())  # a GPU is waited for once
    call, chosen = _prepare(q, k, v, mixing, n, rotary, impl, options | layout._asdict())
    SEEN.add(form)
    if call.options.causal:
        raise ValueError("tokens spread over ranks have no causal mhla, which orders the tokens inside a block.")
    opt = call.options
    if opt.scale is None:
        opt = opt._replace(scale=layout.n_blocks / n)  # of all tokens, not of this rank's
    with plain_precision(call.q):
        if chosen == "triton" and len(q) > 0:
            return _in_triton(call, rotary, opt, counts, group)
        share = Share(layout, sum(counts.tolist()[: dist.get_rank(group)]), q.shape[1], q.device)
        p = prepare_heads(call.q, call.k, call.v, mixing, opt, None, rotary)
        y, total = numerator(p, None, opt, functools.partial(share.weigh, group))
    return to_tokens(y if total is None else y / total, call.q.dtype)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, n: int, rotary: Any, impl: str, options: dict[str, Any]
) -> tuple[BlockCall, str]:
    """Check a call as one with the tokens of all ranks; return it and its implementation, the same on all ranks."""
    one, two, three = (x.new_zeros(1, 1, 1, x.shape[3]).expand(x.shape[0], n, *x.shape[2:]) for x in (q, k, v))
    turned = None if rotary is None else tuple(x.new_zeros(1, *x.shape[1:]).expand(n, *x.shape[1:]) for x in rotary)
    call = prepare(one, two, three, mixing, rotary=turned, **options)
    chosen = choose(call, impl)
    q, k, v = (x.to(checked.dtype) for x, checked in zip((q, k, v), (call.q, call.k, call.v), strict=True))
    return call._replace(q=q, k=k, v=v), chosen


@torch._disable_dynamo
def _in_triton(call: BlockCall, rotary: Any, options: BlockOptions, counts: Tensor, group: Any) -> Tensor:
    features = (feature(x, options.feature_map) for x in call[:2])
    tokens = (x if x.stride(3) == 1 else x.contiguous() for x in (*features, call.v))
    return _Mix.apply(*tokens, call.mixing, *(rotary or (None, None)), options, counts, group)


class _Mix(torch.autograd.Function):
    """Stages of `blockmix.fused.shared`, with a sum over the ranks after the first and the third."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, cos: Tensor | None, sin: Tensor | None,
        options: BlockOptions, counts: Tensor, group: Any,
    ) -> Tensor:  # fmt: skip
        from ..blockmix.fused.shared import Shared

        with torch.cuda.device_of(q):
            share = _positions(options.layout, counts[: dist.get_rank(group)].sum(), q.shape[1])
            anchor = _mean(v, options, q.shape[2], group) if options.normalize else None
            call = Shared(q, k, v, mixing, options, cos, sin, share, anchor)
            (local,) = stage("moments", call, call.local)
            _add(call.moments(local), group)
            o, mixed, inverses = stage("mixed", call, call.outputs, local)
        ctx.save_for_backward(q, k, v, mixing, cos, sin, share, anchor, local, mixed, inverses)
        ctx.options = options, group
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from ..blockmix.fused.shared import Shared

        *tensors, local, mixed, inverses = ctx.saved_tensors
        options, group = ctx.options
        call = Shared._make((*tensors[:4], options, *tensors[4:]))
        g = grad if grad.stride(3) == 1 else grad.contiguous()
        with torch.cuda.device_of(g):
            dy, dq, totals = stage("operators", call, call.operator_grads, g, local, mixed, inverses)
            _add(call.moments(dy, operators=True), group)
            dk, dv, dm = stage("tokens", call, call.token_grads, g, local, mixed, inverses, dy, dq, totals)
        # every rank has the gradient of all tokens; its share makes the sum over the ranks right
        return dq, dk, dv, dm / dist.get_world_size(group), None, None, None, None, None


def _add(moments: Iterable[Tensor | None], group: Any) -> None:
    """Add moments over the ranks, in place."""
    for x in moments:
        if x is not None:
            dist.all_reduce(x, group=group)


def _mean(v: Tensor, options: BlockOptions, heads: int, group: Any) -> Tensor:
    """Return the mean of v over the tokens of all ranks, [B * H, Dv]."""
    total = v.sum(1, dtype=torch.float32)
    dist.all_reduce(total, group=group)
    return (total / options.layout.n_tokens).repeat_interleave(heads // v.shape[2], 1).flatten(0, 1)


def _positions(layout: Layout, start: Tensor, n: int) -> Tensor:
    """Return for each block the first position of the n tokens from `start` on, their number and `start`, int32
    [M, 3]. Positions in a block are in the order of the tokens."""
    places, offsets = _places(layout, start.device)
    ends = torch.arange(layout.n_blocks, device=start.device) * layout.n_tokens + start
    begin, end = (torch.searchsorted(places, x) for x in (ends, ends + n))
    return torch.stack([begin - offsets, end - begin, start.expand_as(begin)], 1).int()


@functools.lru_cache(maxsize=64)
def _places(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return block * N + token of all tokens, sorted, and how many lie in earlier blocks, int64 [N], [M]."""
    with torch.inference_mode(False):
        table, blocks = block_table(layout, device), torch.arange(layout.n_blocks, device=device)
        places = (table * layout.n_tokens + torch.arange(layout.n_tokens, device=device)).sort().values
        return places, torch.searchsorted(places, blocks * layout.n_tokens)


class Share:
    """Blocks that contain tokens of one rank, the `n` tokens from `start` on. Blocks are padded with zeros."""

    def __init__(self, layout: Layout, start: int, n: int, device: torch.device) -> None:
        self.n_blocks = layout.n_blocks
        self.blocks, self.tokens, self.places = slots_of(layout, start, n, device)

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
