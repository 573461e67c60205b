"""Custom operator `hla_kernels::causal_step`: one token of la, hla2, ahla and hla3 in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...dispatch.operator import custom_op
from ...dispatch.recording import launch, repeated
from ...features import feature, feature_width
from .operator import log2_decay
from .plan import padded


@custom_op("causal_step")
def causal_step(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None, state: Sequence[Tensor], op: str, feature_map: str | None,
    normalize: bool, scale: float | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return o [B, 1, H, Dv] of one token and up to three states after it; no backward.

    q [B, 1, H, D], k [B, 1, Hk, D], v [B, 1, Hk, Dv]; gamma as in `causal_stages`; state: float32 tensors [B, Hk, 1 or
    G, D, Dz], see `contents.STAGES`; arguments are checked by `op.run`.
    """
    if not q.shape[0]:
        return _empty(q, v, state)
    log2, form = log2_decay(gamma, q.shape[2], k.shape[2]), (op, feature_map, normalize, scale, eps)
    with torch.cuda.device_of(q):
        run = partial(_step, q, k, v, log2, state, *form)
        o, *after = repeated(("causal_step", *form), (q, k, v, log2, *state), run)
    return o, after[0], after[1], after[2]


def _step(
    q: Tensor, k: Tensor, v: Tensor, log2: Tensor | None, state: Sequence[Tensor], op: str, feature_map: str | None,
    normalize: bool, scale: float | None, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    from .step import causal_step

    o, *after = _empty(q, v, state)
    (b, _, h, d), hk, dv = q.shape, k.shape[2], v.shape[3]
    name = None if feature_map == "identity" else feature_map
    tokens = (q if name is None else feature(q.float(), name), k if name is None else feature(k.float(), name), v)
    width, groups = feature_width(d, feature_map), tuple(x.shape[2] > 1 for x in state)
    launch(
        causal_step, (h, b), *(x.contiguous() for x in tokens), log2, tuple(x.contiguous() for x in state),
        tuple(after[: len(state)]), o, h // hk, 1.0 if scale is None else scale, eps, GROUPS=groups, OP=op, D=width,
        DV=dv, DP=padded(width), VP=padded(dv), RATIO=normalize, num_warps=8 if max(width, dv) > 64 else 4,
    )  # fmt: skip
    return o, *after


def _empty(q: Tensor, v: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    like = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in state]
    like += [q.new_empty(0) for _ in range(3 - len(state))]
    return q.new_empty((*q.shape[:3], v.shape[3])), like[0], like[1], like[2]


@causal_step.register_fake
def _(q, k, v, gamma, state, op, feature_map, normalize, scale, eps):
    return _empty(q, v, state)
