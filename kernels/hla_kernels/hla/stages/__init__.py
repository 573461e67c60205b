"""Triton form of the causal operators: compositions of decayed sums over earlier tokens.

A sequence is divided into segments of chunks of 64 tokens. If there are several segments, one launch computes the state
of each, and another one carries states from segment to segment, from the state of the call if there is one; then one
program per segment walks over its chunks with the state in registers. The backward has the same sums, over earlier and
over later tokens. No atomics. In products, the computed factor is the second operand (see `tiles`).

Reading order: tiles, kernels, plan, launch, compose (equations), operator. The first call imports Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...features import feature_width
from ...options import Options, is_paper
from ..streaming.contents import STAGES, Sizes, contents
from ..streaming.state import State
from .operator import causal_stages

__all__ = ["causal_stages", "evaluate", "slower", "why_not"]

WIDEST = 128


def why_not(op: str, q: Tensor, v: Tensor, options: Options, return_state: bool | str = False) -> str | None:
    """Return the reason why there is no Triton form of a causal call, or None."""
    form = "the Triton form of causal calls"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{form} is for bfloat16 and float16, not {q.dtype}"
    d, dv = feature_width(q.shape[3], options.feature_map), v.shape[3]
    if d % 8 or dv % 8 or max(d, dv) > WIDEST:
        return f"{form} needs features and values of a multiple of 8 channels, at most {WIDEST}, got {d} and {dv}"
    given = (("center", options.center is not None), ("mean_path", options.mean_path), ("ridge", options.ridge != 0))
    if return_state == "mergeable":
        return f"{form} has no summaries for merging"
    for name, used in given:
        if used:
            return f"{form} has no {name}"
    return f"{form} has no decay_rule='paper'" if is_paper(op, options) else None


def slower(q: Tensor, options: Options) -> str | None:
    """Return the reason why `auto` does not use the Triton form of a causal call, or None."""
    if options.causal and options.normalize:
        return "slower: causal ratios take as long as in torch, and their gradients are less accurate"
    if options.causal and q.dtype == torch.float16:
        return "slower: its causal stages in float16 were never timed, and are up to 4 times less accurate"
    return None


def evaluate(
    op: str, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None, options: Options, state: State | None,
    keep: bool, save: bool,
) -> tuple[Tensor, State | None]:  # fmt: skip
    """Return (o [B, N, H, Dv], the state after the tokens if `keep`) of a checked causal call; save: whether there will
    be a backward."""
    o, (b, n, h, _), hk = options, q.shape, k.shape[2]
    first = None
    if state is not None:
        wide = [state.tensors[name].float() for name in STAGES[op]]
        wide = [x.expand(b, hk, h // hk, *x.shape[3:]).reshape(b, h, -1) for x in wide]
        first = torch.cat(wide, 2)
    y, last, *_ = causal_stages(q, k, v, gamma, first, op, o.feature_map, o.normalize, o.scale, o.eps, save, keep)
    if not keep:
        return y, None
    heads = (1, 1) if gamma is None else (gamma.shape[1], gamma.shape[2])
    sizes = Sizes(b, hk, h // hk, feature_width(q.shape[3], o.feature_map), v.shape[3], heads)
    shapes, place, tensors = contents(op, options, sizes), 0, {}
    for name in STAGES[op]:
        rows, columns = shapes[name][3:]
        x = last[:, :, place : place + rows * columns].unflatten(2, (rows, columns)).unflatten(1, (hk, h // hk))
        tensors[name], place = x[:, :, : shapes[name][2]].contiguous(), place + rows * columns
    if gamma is not None:
        tensors["gamma"] = gamma.float()
    count = torch.full((), n, dtype=torch.int64, device=q.device)
    return y, State(op, options, count if state is None else count + state.n, tensors)
