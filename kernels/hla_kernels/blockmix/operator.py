"""Block mixing as torch.library custom operators.

`hla_kernels::mhla` takes (q, k, v), `hla_kernels::mhla_qkvpacked` takes qkv [B, N, 3, H, D] and its backward writes one
packed gradient. Arguments are checked by `call.prepare`.

They return (o, saved). With `save`, `saved` holds what the backward would otherwise recompute; it is empty in the torch
form, which recomputes blocks and moments from the inputs. `impl`, chosen in `op`, is "torch" (`torch_form`) or
"triton" (`fused`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch.operator import in_triton, joined, parts, rooms, token_operators
from ..dispatch.recording import repeated
from ..options import plain_precision
from . import fused
from .layout import BlockOptions, Layout
from .torch_form import evaluate, gradient

SCHEMA = (  # of arguments behind the tokens
    "Tensor mixing, Tensor? mask, Tensor? cos, Tensor? sin, str order, SymInt[] grid, SymInt[] blocks, SymInt prefix, "
    "str? feature_map, bool normalize, bool causal, float? scale, float q_scale, float eps, bool rotary_half, "
    'str moments, str impl="torch", bool save=False'
)


def options_of(order: str, grid: Sequence[int], blocks: Sequence[int], prefix: int, *others: Any) -> BlockOptions:
    """Return the options from the arguments of the operator, the inverse of `flat`."""
    return BlockOptions(Layout(tuple(grid), tuple(blocks), prefix), order, *others)


def flat(options: BlockOptions) -> tuple:
    """Return the options as arguments of the operator, in its order."""
    (grid, blocks, prefix), order, *rest = options
    return (order, list(grid), list(blocks), prefix, *rest)


def _rotary(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if cos is None or sin is None else (cos, sin)


def _forward(
    tokens: Sequence[Tensor], mixing: Tensor, mask: Tensor | None, cos: Tensor | None, sin: Tensor | None, *flags: Any
) -> tuple[Tensor, Tensor]:
    *given, impl, save = flags
    first, rotary, options = tokens[0], _rotary(cos, sin), options_of(*given)
    if not in_triton(impl, first):
        q, k, v = parts(tokens)
        with plain_precision(first):
            return evaluate(q, k, v, mixing, options, mask, rotary), q.new_empty((0,), dtype=torch.float32)

    def work() -> tuple[Tensor, ...]:
        q, k, v = parts(tokens)
        return fused.forward(q, k, v, mixing, options, mask, rotary, save)

    with torch.cuda.device_of(first):
        o, saved = repeated(("mhla", options, save), (*tokens, mixing, mask, cos, sin), work)
        return o, saved


def _backward(
    grad: Tensor, saved: Tensor, tokens: Sequence[Tensor], mixing: Tensor, mask: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, *flags: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of `tokens` and of the mixing matrix."""
    *given, impl = flags
    first, rotary, options = tokens[0], _rotary(cos, sin), options_of(*given)
    if not in_triton(impl, first):
        q, k, v = parts(tokens)
        with plain_precision(first):
            *grads, dm = gradient(grad, q, k, v, mixing, options, mask, rotary)
        return (*joined(grads, tokens), dm)

    def work() -> tuple[Tensor, ...]:
        q, k, v = parts(tokens)
        grads, each = rooms(tokens, mask)
        return (*grads, fused.backward(grad, q, k, v, mixing, options, mask, rotary, each, saved))

    with torch.cuda.device_of(first):
        return repeated(("mhla backward", options), (*tokens, grad, saved, mixing, mask, cos, sin), work)


def _outputs(
    tokens: Sequence[Tensor], mixing: Tensor, mask: Tensor | None, cos: Tensor | None, sin: Tensor | None, *flags: Any
) -> tuple[Tensor, Tensor]:
    *given, impl, save = flags
    q, k, v = tokens if len(tokens) == 3 else tokens[0].unbind(2)
    kept = save and impl == "triton"
    length = fused.saved_floats(q, k, v, options_of(*given), cos is not None) if kept else 0
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty((length,), dtype=torch.float32)


RULES = (SCHEMA, _forward, _outputs, _backward)
mhla_op, mhla_backward = token_operators("mhla", 3, *RULES)
mhla_packed_op, mhla_packed_backward = token_operators("mhla_qkvpacked", 1, *RULES)
