"""Triton form of the causal operators: compositions of decayed sums over earlier tokens.

A sequence is divided into segments of chunks of 64 tokens. If there are several segments, one launch computes the state
of each, and another one carries states from segment to segment, from the state of the call if there is one; then one
program per segment walks over its chunks with the state in registers. Frames (causal="frame") are segments whose tokens
read the state after their frame; a decay acts from frame to frame. The backward has the same sums, over earlier and
over later tokens; two of them whose states are each other's transpose share one. No atomics. In products, the computed
factor is the second operand (see `tiles`).

Some calls without a backward are one launch, which walks through all stages at once (`causal_walk`).

Reading order: tiles, kernels, plan, launch, compose and paper (equations), rows (maps), walk, operator; step, decode (a
single token). The first call imports Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch.operator import needs_backward, refuse_forward_mode
from ...features import feature_width
from ...options import Options, is_paper
from ..streaming.contents import STAGES, Sizes, contents
from ..streaming.state import State
from .decode import causal_step
from .operator import causal_stages

__all__ = ["causal_stages", "evaluate", "why_not"]

WIDEST = 128


def why_not(q: Tensor, v: Tensor, options: Options, return_state: bool | str = False) -> str | None:
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
    return None


def evaluate(
    op: str, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None, options: Options, state: State | None,
    keep: bool,
) -> tuple[Tensor, State | None]:  # fmt: skip
    """Return (o [B, N, H, Dv], the state after the tokens if `keep`) of a checked causal call. Raises ValueError
    for dual tensors."""
    o, (b, n, h, _), hk = options, q.shape, k.shape[2]
    form = "paper" if is_paper(op, o) else op
    rest = (form, o.feature_map, o.normalize, o.scale)
    names, tensors = STAGES[form], {} if gamma is None else {"gamma": gamma.float()}
    given = [] if state is None else [state.tensors[name].float() for name in names]
    refuse_forward_mode(op, q, k, v, gamma, *given)
    save = needs_backward(q, k, v, gamma, *given)
    if given and keep and n == 1 and not save and form != "paper":
        y, *after = causal_step(q, k, v, gamma, given, *rest, o.eps)
        tensors |= zip(names, after, strict=False)
    else:
        wide = [x.expand(b, hk, h // hk, *x.shape[3:]).flatten(3).flatten(1, 2) for x in given]
        first = torch.cat(wide, 2) if wide else None
        y, last, *_ = causal_stages(q, k, v, gamma, first, *rest, o.frame, o.eps, save, keep)
        if keep:
            tensors |= _tensors(form, options, last, q, k, v, gamma)
    if not keep:
        return y, None
    count = torch.full((), n, dtype=torch.int64, device=q.device)
    return y, State(op, options, count if state is None else count + state.n, tensors)


def _tensors(
    op: str, options: Options, last: Tensor, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None
) -> dict[str, Tensor]:
    """Return the tensors of a state; `last`, the output of `causal_stages`, has all of them per query head."""
    group = q.shape[2] // k.shape[2]
    shapes, place, found = contents(op, options, Sizes.of(q, k, v, gamma, options.feature_map)), 0, {}
    for name in STAGES[op]:
        _, _, groups, rows, columns = shapes[name]
        x = last[:, :, place : place + rows * columns].unflatten(2, (rows, columns)).unflatten(1, (-1, group))
        found[name], place = x[:, :, :groups].contiguous(), place + rows * columns
    return found
