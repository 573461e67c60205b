"""Launches of the kernels, and the operator that autograd sees."""

from __future__ import annotations

import torch
from torch import Tensor

BI, BJ, WARPS, STAGES = 64, 64, 4, 2
KEYS = (32, 64, 4, 2)  # the same of the pass over keys


def _strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


@torch.library.custom_op("hla_kernels::multipole", mutates_args=())
def multipole_op(
    q: Tensor, a: Tensor, c: Tensor, v: Tensor, pos: Tensor, radius: int, degree: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(o [B, N, H, D], logarithm of the divisor [B, H, N]); q, a, c, v [B, N, H, D]."""
    from .kernels import output

    q, v, a, c = _rows(q), _rows(v), a.contiguous(), c.contiguous()
    b, n, h, d = q.shape
    o, top = q.new_empty(q.shape), q.new_empty((b, h, n), dtype=torch.float32)
    grid = (-(-n // BI), b * h)
    if b:
        with torch.cuda.device_of(q):
            output[grid](
                q, a, c, v, o, top, pos, *_strides(q), *_strides(a), *_strides(v), n, h, scale, radius,
                DEGREE=degree, D=d, BI=BI, BJ=BJ, num_warps=WARPS, num_stages=STAGES,
            )  # fmt: skip
    return o, top


@multipole_op.register_fake
def _(q, a, c, v, pos, radius, degree, scale):
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


@torch.library.custom_op("hla_kernels::multipole_backward", mutates_args=())
def multipole_backward(
    grad: Tensor, q: Tensor, a: Tensor, c: Tensor, v: Tensor, pos: Tensor, o: Tensor, top: Tensor, radius: int,
    degree: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, da, dc, dv)."""
    from .kernels import for_keys, for_queries

    q, v, a, c, grad = _rows(q), _rows(v), a.contiguous(), c.contiguous(), grad.contiguous()
    b, n, h, d = q.shape
    dq, da, dc, dv = (x.new_empty(q.shape) for x in (q, a, c, v))
    delta = torch.empty_like(top)
    places = (*_strides(q), *_strides(a), *_strides(v), n, h, scale, radius)
    if b:
        with torch.cuda.device_of(q):
            for_queries[(-(-n // BI), b * h)](
                q, a, c, v, o, grad, top, delta, dq, pos, *places,
                DEGREE=degree, D=d, BI=BI, BJ=BJ, num_warps=WARPS, num_stages=STAGES,
            )  # fmt: skip
            for_keys[(-(-n // KEYS[1]), b * h)](
                q, a, c, v, grad, top, delta, da, dc, dv, pos, *places,
                DEGREE=degree, D=d, BI=KEYS[0], BJ=KEYS[1], num_warps=KEYS[2], num_stages=KEYS[3],
            )  # fmt: skip
    return dq, da, dc, dv


@multipole_backward.register_fake
def _(grad, q, a, c, v, *rest):
    return tuple(x.new_empty(q.shape) for x in (q, a, c, v))


def _setup(ctx, inputs, output):
    *tensors, ctx.radius, ctx.degree, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx, grad, _):
    if grad is None:
        return (None,) * 8
    found = multipole_backward(grad, *ctx.saved_tensors, ctx.radius, ctx.degree, ctx.scale)
    return (*found, None, None, None, None)


multipole_op.register_autograd(_gradients, setup_context=_setup)
