"""Second-order Taylor attention as torch.library custom operators.

`hla_kernels::taylor2` takes (q, k, v), `hla_kernels::taylor2_narrow` (q, k, v, q2, k2),
`hla_kernels::taylor2_qkvpacked` qkv [B, N, 3, H, D], whose backward writes one packed gradient. They save their inputs
only and recompute the rest (`torch_form`, `gradient`): nothing saved grows with N^2 or with the number of features.
Arguments are checked by `call.prepare`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...dispatch.operator import joined, token_operators
from ...options import plain_precision
from .gradient import gradient
from .torch_form import evaluate

SCHEMA = "Tensor coefficients, Tensor? mask, bool normalize, float q_scale"  # of arguments behind the tokens


def _parts(tokens: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return q, k, v, q2, k2 or q, k, v."""
    return tuple(tokens) if len(tokens) > 1 else tokens[0].unbind(2)


def _forward(tokens: Sequence[Tensor], *arguments: Any) -> tuple[Tensor, Tensor]:
    with plain_precision(tokens[0]):
        return evaluate(_parts(tokens), *arguments), tokens[0].new_empty((0,))


def _outputs(tokens: Sequence[Tensor], *arguments: Any) -> tuple[Tensor, Tensor]:
    q, _, v, *_ = _parts(tokens)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty((0,))


def _backward(grad: Tensor, _: Tensor, tokens: Sequence[Tensor], *arguments: Any) -> tuple[Tensor, ...]:
    with plain_precision(grad):
        *grads, last = gradient(grad, _parts(tokens), *arguments)
    return (*joined(grads, tokens), last)


RULES = (SCHEMA, _forward, _outputs, _backward)
OPERATORS = {  # (operator, backward) by the number of tensors of tokens
    n: token_operators(name, n, *RULES)
    for n, name in ((3, "taylor2"), (5, "taylor2_narrow"), (1, "taylor2_qkvpacked"))
}
