"""Two-sided calls whose tokens are spread over the ranks of a process group (context parallelism).

Each rank sums over its tokens, one all-reduce adds the sums (D x D numbers per head and moment, independent of the
number of tokens), and each rank computes the outputs of its queries.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...checks import check_op
from ...features import feature
from ...op import prepare
from ...options import compute_dtype, plain_precision
from ..layout import to_heads, to_tokens
from ..moments import mixture_weights, moments, operator_matrix, read_out, token_sums


class _AddRanks(torch.autograd.Function):
    """Sum of a tensor over the ranks. All ranks use the result, so its gradient is summed over the ranks too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def add_ranks(x: Tensor, group: Any) -> Tensor:
    """Return the sum of x [...] over the ranks of `group`, on all ranks. Its gradient is summed over them too."""
    return _AddRanks.apply(x, group)


def sharded(
    op: Any, q: Tensor, k: Tensor, v: Tensor, *, group: Any, coefficients: Tensor | None = None, **options: Any
) -> Tensor:
    """Return o [B, N, H, Dv] of this rank's tokens for `op` over the tokens of all ranks of `group`.

    op: a two-sided operator or its name. q [B, N, H, D], k, v [B, N, Hk, .]: this rank's tokens; N may be 0 and may
    differ between ranks. options: as for the operator; they and `coefficients` [H, 4] must be equal on all ranks. All
    ranks must call this function, and all must run the backward pass. Gradients refer to the sum of the losses of all
    ranks; the gradient of `coefficients` is this rank's share.

    Raises ValueError like the operator, for causal, masked, stateful and softmax calls, and for an impl other than
    "auto" and "torch".
    """
    name = getattr(op, "__name__", op)
    check_op(name)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group must be a process group of torch.distributed, or None for all ranks, got {group!r}.")
    if options.get("impl") in ("reference", "triton"):
        raise ValueError(f'impl="{options["impl"]}" cannot run tokens spread over ranks; use impl="auto".')
    call = _prepare(name, q, k, v, coefficients, options)
    masked = call.sequences.mask is not None or call.sequences.cu_seqlens is not None
    if name == "softmax_attention" or call.options.causal or masked or call.state is not None or call.return_state:
        raise ValueError(
            f"tokens can be spread over ranks for two-sided linear operators without mask and state, not for this "
            f"call of {name}."
        )
    with plain_precision(call.q):
        return _evaluate(call, group)


def _prepare(name: str, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor | None, options: dict[str, Any]) -> Any:
    """Check a call. A rank without tokens must take part in the all-reduce: its call is checked with one token and run
    without."""
    if not all(isinstance(x, Tensor) and x.dim() == 4 and x.shape[1] == 0 for x in (q, k, v)):
        return prepare(name, q, k, v, coefficients, **options)
    one, two, three = (x.new_zeros(x.shape[0], 1, *x.shape[2:]) for x in (q, k, v))
    call = prepare(name, one, two, three, coefficients, **options)
    q, k, v = (x.to(checked.dtype) for x, checked in zip((q, k, v), (call.q, call.k, call.v), strict=True))
    return call._replace(q=q, k=k, v=v)


def _evaluate(call: Any, group: Any) -> Tensor:
    dtype, n_key_heads = compute_dtype(call.q.dtype), call.k.shape[2]
    q, k, v = (to_heads(x, n_key_heads, dtype) for x in (call.q, call.k, call.v))
    q, k = feature(q, call.options.feature_map), feature(k, call.options.feature_map)
    sums, n = _total(token_sums(call.op, q, k, v, call.options), q.shape[-2], group)
    weights = None if call.coefficients is None else mixture_weights(call.coefficients, n_key_heads, dtype)
    matrix = operator_matrix(call.op, moments(call.op, sums, n, call.options), weights)
    return to_tokens(read_out(q, matrix, sums, n, call.options), call.q.dtype)


def _total(sums: dict[str, Tensor], n: int, group: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Add the sums and the number of tokens of all ranks in one all-reduce."""
    parts = [*sums.values(), next(iter(sums.values())).new_full((1,), n)]
    flat = add_ranks(torch.cat([x.flatten() for x in parts]), group)
    *totals, count = flat.split([x.numel() for x in parts])
    return {name: x.view(sums[name].shape) for name, x in zip(sums, totals, strict=True)}, count[0]
