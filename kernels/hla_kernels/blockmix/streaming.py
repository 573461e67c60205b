"""Causal block mixing with a state; results do not depend on how a sequence is divided into calls.

A query weighs the blocks before it by its own row of the mixing matrix, so the state is the moments of every block so
far (`causal`), M D Dv numbers per head for first order and M (D^2 + 2 D Dv) for the others: it grows with the blocks,
not with the tokens, and is no D x Dv matrix as for `linear_attention`. With the ratio there are as many again with Dv =
1. One token costs one row of the mixture, M D Dv, or M D^2 Dv. Plain differentiable torch code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..features import feature_width
from ..hla.layout import to_tokens
from ..hla.streaming.checks import check_devices, check_finite, check_held, check_shapes
from . import causal
from .layout import Layout, block_slots, block_table
from .options import BlockOptions
from .torch_form import Prepared, prepare_heads


@dataclass(eq=False)
class BlockState:
    """State of causal `mhla` after `n` tokens (a 0-d integer tensor, so that decoding does not recompile).

    tensors: the moments [B, Hk, 1 or G, M, F, F or Dv] of each block of the layout, zeros for those to come, by their
    names in `causal` (P for first order); with the ratio also those of v = 1, by the names with a z before them.
    float32, float64 for float64 tokens.
    """

    options: BlockOptions
    n: Tensor
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def detach(self) -> BlockState:
        """The same numbers without their history."""
        return replace(self, tensors={name: x.detach() for name, x in self.tensors.items()})

    @property
    def nbytes(self) -> int:
        """Bytes held by the tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors.values())


def check_state(state: object, options: BlockOptions, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless `state` is one that a call with these options and sizes continues."""
    if not isinstance(state, BlockState):
        raise ValueError(f"state must be a BlockState returned by mhla with return_state, got {type(state).__name__}.")
    if state.options._replace(layout=options.layout) != options:
        raise ValueError(f"The state was made with {state.options}, it cannot continue {options}.")
    old, new = _starts(state.options.layout), _starts(options.layout)
    if old[:-1] != new[: len(old) - 1] or (len(old) == len(new) and old[-1] > new[-1]):
        raise ValueError(
            f"The state has blocks of the layout {tuple(state.options.layout)}, which do not begin where those of "
            f"{tuple(options.layout)} do."
        )
    check_held("mhla", state.n, state.tensors, _names(options))
    check_shapes(state.tensors, _shapes(state, q, k, v))
    check_devices(state.n, state.tensors, q.device)
    check_finite(state.tensors)
    if torch.compiler.is_compiling() or state.n.device.type != "cpu":
        return
    if int(state.n) < 0:
        raise ValueError(f"The state's n must be the number of its tokens, got {int(state.n)}.")
    if int(state.n) + k.shape[1] > options.layout.n_tokens:
        raise ValueError(
            f"The grid {options.layout.grid} holds {options.layout.n_tokens} tokens, the state has {int(state.n)} and "
            f"{k.shape[1]} more came; give a longer grid with as many more blocks, and a mixing for them."
        )


def _names(options: BlockOptions) -> list[str]:
    """The tensors of a state: moments, and with the ratio those of v = 1."""
    names = causal.MOMENTS[options.order]
    return [*names, *(f"z{name}" for name in names if options.normalize)]


def _shapes(state: BlockState, q: Tensor, k: Tensor, v: Tensor) -> dict[str, tuple[int, ...]]:
    """Their shapes [B, Hk, 1 or G, M, F, F or Dv]. What queries enter has one entry for each of them, and so has a
    moment of keys that were turned by the angles of each query head."""
    options, (b, _, heads, d) = state.options, q.shape
    group, f = heads // k.shape[2], feature_width(d, options.feature_map)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in _names(options):
        x = state.tensors[name]
        turned = x.dim() == 6 and x.shape[2] == group and not name.startswith("z")
        own = name[-1] in causal.OF_QUERIES or turned
        columns = f if name[-1] in causal.OF_FEATURES else 1 if name.startswith("z") else v.shape[3]
        shapes[name] = (b, k.shape[2], group if own else 1, options.layout.n_blocks, f, columns)
    return shapes


def _starts(layout: Layout) -> list[int]:
    """First token of each block that is a run of tokens, and the end."""
    row = (layout.n_tokens - layout.prefix) // layout.grid[0]
    return [0] * (layout.prefix > 0) + [layout.prefix + row * start for start in layout.starts(0)]


def stream(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, options: BlockOptions, rotary: tuple[Tensor, Tensor] | None,
    state: BlockState | None,
) -> tuple[Tensor, BlockState]:  # fmt: skip
    """(o [B, m, H, Dv], state) of m tokens behind those of `state`; rotary tables are those of these tokens."""
    p = prepare_heads(q, k, v, mixing, options, None, rotary)
    n = torch.zeros((), dtype=torch.int64, device=q.device) if state is None else state.n
    place = Place(options, n, q.shape[1])
    given = {} if state is None else state.tensors
    before = {name: _grow(x.to(p.v.dtype), options.layout.n_blocks) for name, x in given.items()}
    names = causal.MOMENTS[options.order]
    y, moments = place.step(p, *(p.turned or (p.phi_q, p.phi_k)), p.v, [before[name] for name in names if before])
    after = dict(zip(names, moments, strict=True))
    if options.normalize:
        ones, names = torch.ones_like(p.v[..., :1]), tuple(f"z{name}" for name in names)
        total, moments = place.step(p, p.phi_q, p.phi_k, ones, [before[name] for name in names if before])
        y, after = y / (total + options.eps), after | dict(zip(names, moments, strict=True))
    return to_tokens(y, q.dtype), BlockState(options, n + q.shape[1], after)


def _grow(x: Tensor, n_blocks: int) -> Tensor:
    """Zeros for the blocks that a longer layout has besides."""
    return torch.cat([x, x.new_zeros((*x.shape[:-3], n_blocks - x.shape[-3], *x.shape[-2:]))], -3)


class Place:
    """Where m tokens behind n others lie; n is a tensor, m a number."""

    def __init__(self, options: BlockOptions, n: Tensor, m: int) -> None:
        self.layout, self.order, self.m = options.layout, options.order, m
        self.index = n + torch.arange(m, device=n.device)

    def step(
        self, p: Prepared, q: Tensor, k: Tensor, v: Tensor, before: Sequence[Tensor]
    ) -> tuple[Tensor, causal.Moments]:
        """(W v without the ratio, moments after these tokens) of features q, k [B, Hk, G, m, F], v [B, Hk, 1, m, E];
        before: moments, none at the start."""
        order = self.order
        moments = tuple(before) or causal.no_moments(q, k, v, self.layout.n_blocks, order)
        if self.m == 1:
            block = block_table(self.layout, q.device)[self.index]
            return causal.one(q * p.s, k, v, p.m, order, moments, block)
        where = block_slots(self.layout, q.device)[1][self.index]
        q, k, v = (self._cut(x, where) for x in (q * p.s, k, v))
        y, after = causal.step(q, k, v, p.m, order, moments)
        return y.flatten(-3, -2)[..., where, :], after

    def _cut(self, x: Tensor, places: Tensor) -> Tensor:
        """[.., m, F] -> all blocks of the layout [.., M, W, F], zeros where there is none of these tokens."""
        n_blocks, width = self.layout.n_blocks, self.layout.widest
        blocks = x.new_zeros((*x.shape[:-2], n_blocks * width, x.shape[-1])).index_copy(-2, places, x)
        return blocks.unflatten(-2, (n_blocks, width))


def _flatten(state: BlockState) -> tuple[list[Tensor], tuple]:
    return [state.n, *state.tensors.values()], (state.options, tuple(state.tensors))


def _unflatten(leaves, context) -> BlockState:
    n, *tensors = leaves
    return BlockState(context[0], n, dict(zip(context[1], tensors, strict=True)))


pytree.register_pytree_node(BlockState, _flatten, _unflatten, serialized_type_name="hla_kernels.BlockState")
