"""Causal torch form as the torch.library custom operator `hla_kernels::causal`, without a state.

It saves its inputs only and recomputes the stages in the backward pass; the float32 copies and C x C scores of all
chunks would take many times the memory of the inputs in bfloat16. torch.compile traces it as a single operator, so one
graph serves every N.
"""

from __future__ import annotations

from torch import Tensor

from ..dispatch.operator import recomputed_op
from ..options import Options, plain_precision
from .causal import causal


def evaluate(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None, op: str, feature_map: str | None, normalize: bool,
    center: str | None, mean_path: bool, decay_rule: str, ridge: float, scale: float | None, eps: float, frame: int,
) -> Tensor:  # fmt: skip
    """Return o [B, N, H, Dv], see `causal`; arguments are checked by `op.run`."""
    order, decay = "frame" if frame else True, None if gamma is None else "tensor"
    options = Options(
        order, feature_map, normalize, center, mean_path, decay, decay_rule, ridge, scale, eps, 1.0, frame
    )
    with plain_precision(q):
        return causal(op, q, k, v, options, gamma, None, False)[0]


causal_op, causal_backward = recomputed_op(
    "causal", evaluate, lambda q, k, v, *_: q.new_empty((*q.shape[:3], v.shape[3]))
)
