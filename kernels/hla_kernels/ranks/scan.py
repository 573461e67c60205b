"""Causal calls: the state of each rank's segment is merged in the order of the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..hla.streaming.contents import Sizes, contents
from ..hla.streaming.merge import merge
from ..hla.streaming.state import State
from ..op import Call, run
from ..options import compute_dtype
from .collectives import gather_ranks


def scan(call: Call, group: Any, **options: Any) -> Tensor:
    """Return o [B, N, H, Dv] of this rank's tokens: all states are gathered, the earlier ones merged, and the
    operator continues the result. The state is computed again in the backward pass."""
    states = _States(call)
    own = _own_state(call, states, options)
    rows = gather_ranks(own, group)
    # every rank uses `rows`, the first one as zeros: otherwise it would not take part in the backward pass
    before = states.unpack(rows[0].masked_fill(rows.new_ones((), dtype=torch.bool), 0))
    for row in rows[: dist.get_rank(group)]:
        before = merge(before, states.unpack(row))
    if call.q.shape[1] == 0:
        return call.q.new_zeros(*call.q.shape[:3], call.v.shape[3]) + states.pack(before).sum().to(call.q.dtype)
    o, _ = run(call.op, (call.q, call.k, call.v), state=before, return_state=True, **options)
    return o


def _own_state(call: Call, states: _States, options: dict[str, Any]) -> Tensor:
    """Return the state of this rank's tokens as one vector; zeros, connected to the tokens, without tokens."""
    q, k, v = call.q, call.k, call.v
    if q.shape[1] == 0:
        zero = (q.sum() + k.sum() + v.sum()).to(states.dtype)
        return zero.expand(states.size)

    def state(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return states.pack(run(call.op, (q, k, v), return_state="mergeable", **options)[1])

    return checkpoint(state, q, k, v, use_reentrant=False)


class _States:
    """Conversion between mergeable states of a call and vectors of equal length; the decay is not part of them."""

    def __init__(self, call: Call) -> None:
        q, k, v = call.q, call.k, call.v
        self.call, self.dtype = call, compute_dtype(q.dtype)
        sizes = Sizes.of(q, k, v, call.gamma, call.options.feature_map)
        self.shapes = contents(call.op, call.options, sizes, summaries=True)
        self.shapes.pop("gamma", None)

    @property
    def size(self) -> int:
        """Length of a vector: all numbers of a state and its number of tokens."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values()) + 1

    def pack(self, state: State) -> Tensor:
        """Return a state as a vector."""
        numbers = [state.tensors[name].flatten() for name in self.shapes]
        return torch.cat([*numbers, state.n.to(self.dtype)[None]])

    def unpack(self, row: Tensor) -> State:
        """Undo `pack`."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes.values()]
        *parts, n = row.split([*sizes, 1])
        tensors = {name: x.view(shape) for (name, shape), x in zip(self.shapes.items(), parts, strict=True)}
        if self.call.gamma is not None:
            tensors["gamma"] = self.call.gamma.to(self.dtype)
        return State(self.call.op, self.call.options, n[0].round().long(), tensors)
