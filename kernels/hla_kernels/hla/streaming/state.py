"""Streaming state of an operator after a segment of tokens.

All tensors are float32 (float64 for float64 input) in head layout [B, Hk, 1 or G, rows, columns];
`hla.streaming.contents` lists them. E is Dv, plus one column for v = 1 if `normalize` or `mean_path` needs it.

    causal     linear P [D, E]   hla2 S [D, D], F [D, E]   ahla P, E [D, E]   hla3 S, P, F   hla2 by the paper's rule S,
               C, G
    two-sided  raw sums: linear P [D, Dv]   hla2 S, C   ahla R, P   hla3 S, Qm, P   polynomial all five
    sums       sum_q, sum_k, sum_v (causal also sum_r, weight) [1, .] where denominator, mean path or centring needs
               them
    summaries  C0, R, X0, Y0, W, S0, which `merge` needs for the later segment (return_state="mergeable")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...options import Options, is_paper

# symmetric D x D tensors, which `State.pack` stores as D (D + 1) / 2 numbers
SYMMETRIC = ("S", "Qm", "S0", "W")

# summaries of a causal segment, by operator ("paper" is hla2 by the paper's decayed rule)
SUMMARIES = {"linear_attention": (), "hla2": ("C0",), "ahla": ("R",), "hla3": ("X0", "Y0", "W"), "paper": ("S0",)}


@dataclass(eq=False)
class State:
    """State of one operator after `n` tokens (a 0-d integer tensor, so that decoding does not recompile).

    Returned by an operator with `return_state=True` and passed to its next call as `state=`. See `merge` and `read`.
    """

    op: str
    options: Options
    n: Tensor
    tensors: dict[str, Tensor] = field(default_factory=dict)
    packed: bool = False

    def map(self, f: Callable[[Tensor], Tensor]) -> State:
        """Return a state with f applied to every tensor."""
        return replace(self, n=f(self.n), tensors={name: f(x) for name, x in self.tensors.items()})

    def to(self, *args, **kwargs) -> State:
        """Apply `Tensor.to` to every tensor; a dtype changes floating-point tensors only."""
        moved = self.map(lambda x: x.to(*args, **kwargs))
        return moved if moved.n.dtype == self.n.dtype else replace(moved, n=self.n.to(moved.n.device))

    def detach(self) -> State:
        """Detach all tensors from the autograd graph, as for truncated back-propagation."""
        return self.map(Tensor.detach)

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(x.numel() * x.element_size() for x in self.tensors.values())

    @property
    def mergeable(self) -> bool:
        """Whether `merge` accepts this state as its second argument."""
        return merge_obstacle(self.op, self.options) is None and not missing_summaries(self)

    def pack(self) -> State:
        """Store symmetric tensors as upper triangles, [.., D, D] -> [.., D (D + 1) / 2]. Operators accept both."""
        if self.packed:
            return self
        tensors = {name: _pack(x) if name in SYMMETRIC else x for name, x in self.tensors.items()}
        return replace(self, tensors=tensors, packed=True)

    def unpack(self) -> State:
        """Undo `pack`."""
        if not self.packed:
            return self
        tensors = {name: _unpack(x) if name in SYMMETRIC else x for name, x in self.tensors.items()}
        return replace(self, tensors=tensors, packed=False)


def summaries_of(op: str, options: Options) -> tuple[str, ...]:
    """Return the names of the summaries in a mergeable state of `op`; a two-sided state needs none."""
    return SUMMARIES["paper" if is_paper(op, options) else op] if options.causal else ()


def merge_obstacle(op: str, options: Options) -> str | None:
    """Return the reason why states with these options can never be merged, or None."""
    if options.causal and options.center is not None and op != "linear_attention":
        return (
            f"Causal {op} states with center={options.center!r} cannot be merged: running means enter every inner "
            "stage, so no finite summary exists; pass the state on with state= instead."
        )
    if options.frame and options.decay is not None:
        return "Frame-causal states with a decay cannot be merged; pass the state on with state= instead."
    return None


def missing_summaries(state: State) -> list[str]:
    """Return the names of the summaries that `merge` needs and this state lacks."""
    return [name for name in summaries_of(state.op, state.options) if name not in state.tensors]


def _pack(x: Tensor) -> Tensor:
    rows, columns = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    return x[..., rows, columns]


def _unpack(x: Tensor) -> Tensor:
    d = int((8 * x.shape[-1] + 1) ** 0.5 - 1) // 2
    rows, columns = torch.triu_indices(d, d, device=x.device)
    out = x.new_empty((*x.shape[:-1], d, d))
    out[..., rows, columns] = x
    out[..., columns, rows] = x
    return out


def _flatten(state: State) -> tuple[list[Tensor], tuple]:
    names = tuple(state.tensors)
    return [state.n, *state.tensors.values()], (state.op, state.options, state.packed, names)


def _flatten_with_keys(state: State) -> tuple[list, tuple]:
    leaves, context = _flatten(state)
    return [(pytree.GetAttrKey(name), x) for name, x in zip(("n", *context[3]), leaves, strict=True)], context


def _unflatten(leaves, context) -> State:
    n, *tensors = leaves
    op, options, packed, names = context
    return State(op, options, n, dict(zip(names, tensors, strict=True)), packed)


pytree.register_pytree_node(
    State,
    _flatten,
    _unflatten,
    serialized_type_name="hla_kernels.State",
    flatten_with_keys_fn=_flatten_with_keys,
    to_dumpable_context=lambda c: [c[0], list(c[1]), c[2], list(c[3])],
    from_dumpable_context=lambda c: (c[0], Options(*c[1]), c[2], tuple(c[3])),
)
