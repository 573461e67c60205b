"""Sizes, options, inputs and results of the Triton forms on a GPU."""

import torch

import hla_kernels as hk
from tests.helpers.error_rule import features_as_read

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ANCHORED = {"center": "k", "mean_path": True}
RATIO = {"feature_map": "elu1", "normalize": True}
RATIO_IDENTITY = {"feature_map": "identity", "normalize": True}  # of tokens that are not negative
ELU = {"feature_map": "elu1"}
ELU_CENTRED = ({**ELU, **ANCHORED}, {**ELU, "mean_path": True}, {**ELU, "center": "k"}, {**ELU, "center": "qk"})
SOFTMAX = {"feature_map": "softmax"}
OPS = ("linear_attention", "hla2", "ahla", "hla3")
# op, options, dtype, (B, H, Hk, D, Dv); 128 heads of D = 64 take the one-program forms up to N = 2048
MANY, WIDE, ODD, GROUPED = (32, 4, 4, 64, 64), (2, 2, 2, 128, 128), (2, 2, 2, 72, 72), (2, 4, 2, 88, 64)


def make(n, dtype, sizes, draw=0):
    """q, k, v (views of a packed qkv where shapes allow) and the output's gradient."""
    b, h, heads_k, d, dv = sizes
    g = torch.Generator("cuda").manual_seed(n + 10**6 * draw)
    if h == heads_k and d == dv:
        x = list(torch.randn(b, n, 3, h, d, generator=g, device="cuda").to(dtype).unbind(2))
    else:
        shapes = ((h, d), (heads_k, d), (heads_k, dv))
        x = [torch.randn(b, n, *s, generator=g, device="cuda").to(dtype) for s in shapes]
    return x, torch.randn(b, n, h, dv, generator=g, device="cuda").to(dtype)


def results(op, x, grad, *more, **options):
    """o, dq, dk, dv; more: coefficients, which need no gradient."""
    x = [t.detach().requires_grad_() for t in x]
    y = getattr(hk, op)(*x, *more, **options)
    return [y.detach(), *torch.autograd.grad(y, x, grad.to(y.dtype))]


def truth(op, x, grad, *more, **options):
    """`results` of the torch form in float64, of features as the kernels read them."""
    q, k, v = (t.detach().double().requires_grad_() for t in x)
    fq, fk, options = features_as_read(q, k, options, x[0].dtype)
    y = getattr(hk, op)(fq, fk, v, *more, impl="torch", **options)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), grad.double())]
