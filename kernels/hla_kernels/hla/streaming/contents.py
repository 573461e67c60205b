"""Tensors of a state and their shapes, from the operator, its options and the call.

This table describes both the states that operators return (`causal`, `stream`) and the states that `checks` accepts. A
state with other names or groups belongs to another call, and broadcasting would hide the error.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...features import feature_width
from ...options import Options, is_paper, needs_ones
from ..moments import FACTORS, MOMENTS, sum_names
from .state import summaries_of

Shape = tuple[int, ...]


class Sizes(NamedTuple):
    """Sizes B, Hk, G, D, Dv of a call, and the two head axes (1 or Hk, 1 or G) of its decay."""

    batch: int
    key_heads: int
    group: int
    d: int
    dv: int
    decay_heads: tuple[int, int] = (1, 1)

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None, feature_map: str | None) -> Sizes:
        """Return the sizes of a call with the decay gamma [1, 1 or Hk, 1 or G, 1, 1]; D counts features."""
        heads = (1, 1) if gamma is None else (gamma.shape[1], gamma.shape[2])
        width = feature_width(k.shape[3], feature_map)
        return cls(k.shape[0], k.shape[2], q.shape[2] // k.shape[2], width, v.shape[3], heads)


# causal tensors: groups ("k": 1, or G with a decay per query head; "q": G; "1": 1), rows, columns. E is Dv plus the
# column of ones; tensors that depend on queries have one entry per query head.
CAUSAL = {
    "P": ("k", "D", "E"), "S": ("k", "D", "D"), "F": ("q", "D", "E"), "E": ("q", "D", "E"), "C": ("q", "D", "E"),
    "G": ("q", "D", "E"), "sum_q": ("q", "1", "D"), "sum_k": ("k", "1", "D"), "sum_v": ("k", "1", "E"),
    "sum_r": ("q", "1", "E"), "C0": ("q", "D", "E"), "R": ("q", "D", "D"), "X0": ("q", "D", "E"),
    "Y0": ("q", "D", "D"), "W": ("q", "D", "D"), "S0": ("1", "D", "D"),
}  # fmt: skip
STAGES = {
    "linear_attention": ("P",), "hla2": ("S", "F"), "ahla": ("P", "E"), "hla3": ("S", "P", "F"),
    "paper": ("S", "C", "G"),  # hla2 with the paper's decay rule
}  # fmt: skip


def contents(op: str, options: Options, sizes: Sizes, summaries: bool = False) -> dict[str, Shape]:
    """Return the names and shapes [B, Hk, 1 or G, rows, columns] of the tensors in a state of `op`; `summaries` adds
    the summaries of a mergeable causal state."""
    if options.causal:
        return _causal(op, options, sizes, summaries)
    return _two_sided(op, options, sizes)


def _causal(op: str, options: Options, sizes: Sizes, summaries: bool) -> dict[str, Shape]:
    names = [*_causal_sums(op, options), *STAGES["paper" if is_paper(op, options) else op]]
    names += summaries_of(op, options) if summaries else ()
    # an int: dynamo of torch 2.11 cannot add a bool to a symbolic size
    width = {"D": sizes.d, "E": sizes.dv + (1 if needs_ones(options) else 0), "1": 1}
    groups = {"q": sizes.group, "k": sizes.decay_heads[1], "1": 1}
    out: dict[str, Shape] = {}
    for name in names:
        group, rows, columns = CAUSAL[name]
        out[name] = (sizes.batch, sizes.key_heads, groups[group], width[rows], width[columns])
    if options.mean_path or options.center is not None:
        out["weight"] = (1, *sizes.decay_heads, 1, 1)
    if options.decay is not None:
        out["gamma"] = (1, *sizes.decay_heads, 1, 1)
    return out


def _causal_sums(op: str, options: Options) -> list[str]:
    """Return the names of the running sums: queries and keys for centring, and the values that a centred stage or the
    mean path averages."""
    names = ["sum_q"] if options.center == "qk" else []
    centred = options.center is not None
    names += ["sum_k"] if centred else []
    names += ["sum_v"] if options.mean_path or (centred and op != "hla2") else []
    return names + (["sum_r"] if centred and op == "ahla" else [])


def _two_sided(op: str, options: Options, sizes: Sizes) -> dict[str, Shape]:
    width = {"q": sizes.d, "k": sizes.d, "v": sizes.dv}
    out: dict[str, Shape] = {}
    for name in MOMENTS[op]:
        a, b = FACTORS[name]
        group = sizes.group if "q" in (a, b) else 1
        out[name] = (sizes.batch, sizes.key_heads, group, width[a], width[b])
    for name in sum_names(op, options):
        token = name.removeprefix("sum_")
        out[name] = (sizes.batch, sizes.key_heads, sizes.group if token == "q" else 1, 1, width[token])
    return out
