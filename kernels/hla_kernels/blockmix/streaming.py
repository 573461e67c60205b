"""Causal block mixing with a state; results do not depend on how a sequence is divided into calls.

A query weighs earlier blocks by its row of the mixing matrix, so the state holds the moments of every block (`causal`):
M D Dv numbers per head for first order, M (D^2 + 2 D Dv) for the others, and with the ratio the same for Dv = 1 in
addition. The state grows with the number of blocks, not of tokens. A token costs M D Dv multiplications per head for
first order, M D^2 Dv for the others. Plain differentiable torch code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..features import feature_width
from ..hla.streaming.checks import check_held, check_values
from ..sequences import to_tokens
from . import causal
from .frames import Frames
from .layout import BlockOptions, block_slots, block_table
from .torch_form import Prepared, prepare_heads


@dataclass(eq=False)
class BlockState:
    """State of causal `mhla` after `n` tokens (a 0-d integer tensor, so that decoding does not recompile).

    tensors: moments [B, Hk, 1 or G, M, F, F or Dv] of all blocks of the layout, zeros for later blocks, by their names
    in `causal` (P for first order). With the ratio also the moments for v = 1, whose names have the prefix z. float32,
    or float64 for float64 tokens.
    """

    options: BlockOptions
    n: Tensor
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def detach(self) -> BlockState:
        """Detach all tensors from the autograd graph."""
        return replace(self, tensors={name: x.detach() for name, x in self.tensors.items()})

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(x.numel() * x.element_size() for x in self.tensors.values())


def check_state(state: object, options: BlockOptions, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless a call with these options and sizes can continue `state`."""
    if not isinstance(state, BlockState):
        raise ValueError(f"state must be a BlockState returned by mhla with return_state, got {type(state).__name__}.")
    if state.options._replace(layout=options.layout) != options:
        raise ValueError(f"The state was made with {state.options}, it cannot continue {options}.")
    old, new = _starts(state.options), _starts(options)
    if old[:-1] != new[: len(old) - 1] or (len(old) == len(new) and old[-1] > new[-1]):
        raise ValueError(
            f"The state has blocks of the layout {tuple(state.options.layout)}, which do not begin where the blocks of "
            f"{tuple(options.layout)} do."
        )
    check_held("mhla", state.n, state.tensors, _names(options))
    check_values(state.n, state.tensors, _shapes(state, q, k, v), q.device)
    if torch.compiler.is_compiling() or state.n.device.type != "cpu":
        return
    if int(state.n) < 0:
        raise ValueError(f"The state's n must be the number of its tokens, got {int(state.n)}.")
    if options.causal is True and int(state.n) + k.shape[1] > options.layout.n_tokens:
        raise ValueError(
            f"The grid {options.layout.grid} holds {options.layout.n_tokens} tokens, the state has {int(state.n)} and "
            f"{k.shape[1]} more came; give a longer grid with as many more blocks, and a mixing for them."
        )


def _names(options: BlockOptions) -> list[str]:
    """Return the names of the tensors in a state: moments, and with the ratio also the moments for v = 1."""
    names = causal.MOMENTS[options.order]
    return [*names, *(f"z{name}" for name in names if options.normalize)]


def _shapes(state: BlockState, q: Tensor, k: Tensor, v: Tensor) -> dict[str, tuple[int, ...]]:
    """Return the shapes [B, Hk, 1 or G, M, F, F or Dv] of the tensors in a state. Moments that contain queries have one
    entry per query head, and so have moments of keys rotated by angles per query head."""
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


def _starts(options: BlockOptions) -> list[int]:
    """Return `Layout.runs`; for frames the grid and the blocks of a frame."""
    layout = options.layout
    return [*layout.grid[1:], *layout.blocks, 0] if options.causal == "frame" else layout.runs()


def stream(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, options: BlockOptions, rotary: tuple[Tensor, Tensor] | None,
    state: BlockState | None,
) -> tuple[Tensor, BlockState]:  # fmt: skip
    """Return (o [B, m, H, Dv], state) for m tokens after the tokens of `state`; rotary: tables of the m tokens."""
    p = prepare_heads(q, k, v, mixing, options, None, rotary)
    n = torch.zeros((), dtype=torch.int64, device=q.device) if state is None else state.n
    place = Frames(options.layout) if options.causal == "frame" else Place(options, n, q.shape[1])
    given = {} if state is None else state.tensors
    before = {name: _grow(x.to(p.v.dtype), options.layout.n_blocks) for name, x in given.items()}
    names = causal.MOMENTS[options.order]
    y, moments = place.step(p, *p.features, p.v, [before[name] for name in names if before])
    after = dict(zip(names, moments, strict=True))
    if options.normalize:
        ones, names = torch.ones_like(p.v[..., :1]), tuple(f"z{name}" for name in names)
        total, moments = place.step(p, *p.plain, ones, [before[name] for name in names if before])
        y, after = y / (total + options.eps), after | dict(zip(names, moments, strict=True))
    return to_tokens(y, q.dtype), BlockState(options, n + q.shape[1], after)


def _grow(x: Tensor, n_blocks: int) -> Tensor:
    """Append zeros for the additional blocks of a longer layout."""
    return torch.cat([x, x.new_zeros((*x.shape[:-3], n_blocks - x.shape[-3], *x.shape[-2:]))], -3)


class Place:
    """Positions of m tokens (int) after n tokens (tensor)."""

    def __init__(self, options: BlockOptions, n: Tensor, m: int) -> None:
        self.layout, self.order, self.m = options.layout, options.order, m
        self.index = n + torch.arange(m, device=n.device)

    def step(
        self, p: Prepared, q: Tensor, k: Tensor, v: Tensor, before: Sequence[Tensor]
    ) -> tuple[Tensor, causal.Moments]:
        """Return (W v without the ratio, moments after these tokens) for features q, k [B, Hk, G, m, F] and
        v [B, Hk, 1, m, E]; before: earlier moments, or None at the start."""
        order = self.order
        moments = tuple(before) or causal.no_moments(q, k, v, self.layout.n_blocks, order)
        if self.m == 1:
            block = block_table(self.layout, q.device)[self.index]
            q, k, v = (x.unsqueeze(-3) for x in (q * p.s, k, v))
            y, after = causal.step(q, k, v, p.m, order, moments, block)
            return y.squeeze(-3), after
        where = block_slots(self.layout, q.device)[1][self.index]
        q, k, v = (self._cut(x, where) for x in (q * p.s, k, v))
        y, after = causal.step(q, k, v, p.m, order, moments)
        return y.flatten(-3, -2)[..., where, :], after

    def _cut(self, x: Tensor, places: Tensor) -> Tensor:
        """Sort tokens [.., m, F] into all blocks of the layout [.., M, W, F], with zeros in unused slots."""
        n_blocks, width = self.layout.n_blocks, self.layout.widest
        blocks = x.new_zeros((*x.shape[:-2], n_blocks * width, x.shape[-1])).index_copy(-2, places, x)
        return blocks.unflatten(-2, (n_blocks, width))


def _flatten(state: BlockState) -> tuple[list[Tensor], tuple]:
    return [state.n, *state.tensors.values()], (state.options, tuple(state.tensors))


def _unflatten(leaves, context) -> BlockState:
    n, *tensors = leaves
    return BlockState(context[0], n, dict(zip(context[1], tensors, strict=True)))


pytree.register_pytree_node(BlockState, _flatten, _unflatten, serialized_type_name="hla_kernels.BlockState")
