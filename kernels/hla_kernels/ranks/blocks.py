"""Block mixing: moments of all blocks are added over the ranks. A block may be split between two ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..blockmix.call import BlockCall, check_layout, check_rotary, check_tokens, prepare
from ..blockmix.causal import mix
from ..blockmix.fused.spec import Moments, Saved, Sizes
from ..blockmix.layout import BlockOptions, Layout, block_table, slots_of
from ..blockmix.operator import SCHEMA as ONE_RANK
from ..blockmix.operator import flat, options_of
from ..blockmix.torch_form import block_moments, numerator, prepare_heads, product
from ..checks import cast_tensors
from ..dispatch.operator import parts, token_operators
from ..features import feature
from ..op import choose
from ..options import plain_precision
from ..sequences import to_tokens
from .collectives import add_in_place, add_together, group_named, name_of, one_token, rank_in, stage, token_counts

# of arguments behind the tokens: as for one rank, without a mask, and the name of the process group
SCHEMA = ONE_RANK.replace("Tensor? mask, ", "").split(", str impl")[0] + ", str group"
SEEN: set[tuple] = set()  # (layout, tokens of this rank, ranks) whose tokens were counted


def mix_blocks(
    q: Tensor, k: Tensor, v: Tensor, group: Any, *, mixing: Tensor, grid: Sequence[int], blocks: Sequence[int],
    prefix: int = 0, rotary: tuple[Tensor, Tensor] | None = None, impl: str = "auto", **options: Any,
) -> Tensor:  # fmt: skip
    """Return o [B, N, H, Dv] of this rank's tokens (`hla_kernels.mhla`). Raises ValueError for a causal call."""
    cast_tensors(*one_token(q, k, v))
    check_rotary(rotary, q)
    layout = check_layout(grid, blocks, prefix)
    call, chosen = _prepare(q, k, v, mixing, rotary, impl, options | layout._asdict())
    if call.options.causal:
        raise ValueError("tokens spread over ranks have no causal mhla, which orders the tokens inside a block.")
    opt = call.options
    if opt.scale is None:
        opt = opt._replace(scale=layout.n_blocks / layout.n_tokens)  # of all tokens, not of this rank's
    with plain_precision(call.q):
        if chosen == "triton" and len(q) > 0:
            q, k = (feature(x, opt.feature_map) for x in call[:2])
            return shared_mhla(q, k, call.v, call.mixing, *(rotary or (None, None)), *flat(opt), name_of(group))[0]
        counts = token_counts(call.q.shape[1], group, q.device).tolist()
        check_tokens(sum(counts), opt)
        share = Share(layout, sum(counts[: rank_in(group)[0]]), call.q.shape[1], q.device)
        p = prepare_heads(call.q, call.k, call.v, mixing, opt, None, rotary)
        y, total = numerator(p, None, opt, functools.partial(share.weigh, group))
    return to_tokens(y if total is None else y / total, call.q.dtype)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, rotary: Any, impl: str, options: dict[str, Any]
) -> tuple[BlockCall, str]:
    """Check a call as one with the tokens of all ranks; return it and its implementation, the same on all ranks."""
    n = math.prod(options["grid"]) + options["prefix"]
    one, two, three = (x.new_zeros(1, 1, 1, x.shape[3]).expand(x.shape[0], n, *x.shape[2:]) for x in (q, k, v))
    turned = None if rotary is None else tuple(x.new_zeros(1, *x.shape[1:]).expand(n, *x.shape[1:]) for x in rotary)
    call = prepare(one, two, three, mixing, rotary=turned, **options)
    chosen = choose(call, impl, shared=True)
    q, k, v = (x.to(checked.dtype) for x, checked in zip((q, k, v), (call.q, call.k, call.v), strict=True))
    return call._replace(q=q, k=k, v=v), chosen


def _room(
    tokens: Sequence[Tensor], mixing: Tensor, cos: Tensor | None, sin: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor]:
    """Allocate o and the buffer for the backward: `Saved`, then the share [M, 3]."""
    q, _, v = tokens
    o = options_of(*arguments[:-1])
    length = Sizes.of(q, v, o, cos is not None).saved + 3 * o.layout.n_blocks
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(length, dtype=torch.float32)


def _shared(
    tokens: Sequence[Tensor], mixing: Tensor, cos: Tensor | None, sin: Tensor | None, options: BlockOptions,
    saved: Tensor,
) -> tuple[Any, Tensor]:  # fmt: skip
    """Return the call between the sums, with a view of `saved` as share, and the rest of its buffer."""
    from ..blockmix.fused.shared import Shared

    q, k, v = parts(tokens)
    n = 3 * options.layout.n_blocks
    buffer, share = saved[:-n], saved[-n:].view(torch.int32).view(-1, 3)
    return Shared(q, k, v, mixing, options, cos, sin, share), buffer


def _forward(
    tokens: Sequence[Tensor], mixing: Tensor, cos: Tensor | None, sin: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor]:
    options, group = options_of(*arguments[:-1]), group_named(arguments[-1])
    o, saved = _room(tokens, mixing, cos, sin, *arguments)
    call, buffer = _shared(tokens, mixing, cos, sin, options, saved)
    local, _, anchor, _ = Saved.of(buffer, call.size())
    with torch.cuda.device_of(o):
        counts = token_counts(o.shape[1], group, o.device)
        form = (options.layout, o.shape[1], len(counts))
        if form not in SEEN:  # a GPU is waited for once
            check_tokens(int(counts.sum()), options)
            SEEN.add(form)
        call.share.copy_(_positions(options.layout, counts[: rank_in(group)[0]].sum(), o.shape[1]))
        if anchor is not None:
            mean = _mean(call.v, options, o.shape[2], group).flatten()
            anchor[: len(mean)].copy_(mean)
        stage("moments", call, call.local, buffer)
        _add(local, group)
        stage("mixed", call, call.outputs, buffer, o)
    return o, saved


def _backward(
    grad: Tensor, saved: Tensor, tokens: Sequence[Tensor], mixing: Tensor, cos: Tensor | None, sin: Tensor | None,
    *arguments: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of the tokens and of the mixing matrix."""
    group = group_named(arguments[-1])
    call, buffer = _shared(tokens, mixing, cos, sin, options_of(*arguments[:-1]), saved)
    g = grad if grad.stride(3) == 1 else grad.contiguous()
    with torch.cuda.device_of(g):
        dy, dq, totals = stage("operators", call, call.operator_grads, g, buffer)
        _add(Moments.of(dy, call.size().operators()), group)
        dk, dv, dm = stage("tokens", call, call.token_grads, g, buffer, dy, dq, totals)
    # every rank has the gradient of all tokens; its share makes the sum over the ranks right
    return dq, dk, dv, dm / rank_in(group)[1]


def _mixing_grad(tokens: Sequence[Tensor], mixing: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(mixing, memory_format=torch.contiguous_format)


RULES = (SCHEMA, _forward, _room, _backward, _mixing_grad)
shared_mhla, _ = token_operators("shared_mhla", 3, *RULES, collective=True)


def _add(moments: Iterable[Tensor | None], group: Any) -> None:
    """Add moments over the ranks, in place."""
    for x in moments:
        if x is not None:
            add_in_place(x, group)


def _mean(v: Tensor, options: BlockOptions, heads: int, group: Any) -> Tensor:
    """Return the mean of v over the tokens of all ranks, [B * H, Dv]."""
    total = v.sum(1, dtype=torch.float32)
    add_in_place(total, group)
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
