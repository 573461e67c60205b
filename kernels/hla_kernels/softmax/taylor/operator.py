"""Second-order Taylor attention as the torch.library custom operator `hla_kernels::taylor2`.

It saves its inputs only and recomputes the rest (`torch_form`, `gradient`): nothing saved grows with N^2 or with the
number of features. Its arguments are the fields of `call.TaylorCall`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...dispatch.operator import saved_op
from ...options import plain_precision
from .gradient import gradient
from .torch_form import evaluate


def _forward(
    q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, q2: Tensor | None, k2: Tensor | None, mask: Tensor | None,
    normalize: bool, q_scale: float,
) -> Tensor:  # fmt: skip
    with plain_precision(q):
        return evaluate(_tokens(q, k, v, q2, k2), coefficients, mask, normalize, q_scale)


def _tokens(q: Tensor, k: Tensor, v: Tensor, q2: Tensor | None, k2: Tensor | None) -> tuple[Tensor, ...]:
    return (q, k, v) if q2 is None or k2 is None else (q, k, v, q2, k2)


def _outputs(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _backward(
    grads: list[Tensor], _: list[Tensor], q: Tensor, k: Tensor, v: Tensor, c: Tensor, q2: Tensor | None,
    k2: Tensor | None, *options: Any,
) -> list[Tensor]:  # fmt: skip
    with plain_precision(q):
        dq, dk, dv, *narrow, dc = gradient(grads[0], _tokens(q, k, v, q2, k2), c, *options)
    return [dq, dk, dv, dc, *narrow]


taylor2_op, taylor2_backward = saved_op("taylor2", _forward, _outputs, _backward, count=6)
