"""Inputs and calls of the tests of the Triton form of multipole attention."""

from __future__ import annotations

import math

import torch

import hla_kernels as hk

CASES = {  # grid, blocks, radius, prefix, suffix
    "square": ((16, 16), (4, 4), 2, 1, 0),
    "small blocks": ((16, 16), (8, 8), 1, 0, 0),
    "uneven": ((9, 11), (3, 4), 1, 2, 3),
    "video": ((4, 5, 6), (2, 2, 2), 1, 0, 3),
    "line": ((50,), (5,), 3, 0, 0),
}
POOLED = {  # most blocks are read as one key
    "far line": ((100,), (9,), 2, 1, 0),
    "far": ((24, 25), (8, 7), 1, 2, 1),
    "far cube": ((4, 8, 9), (2, 4, 3), 0, 0, 3),
    "far video": ((6, 13, 12), (3, 6, 4), 0, 0, 9),
}


def setting(case, d, dtype, device, size=1.0):
    grid, blocks, radius, prefix, suffix = (CASES | POOLED)[case]
    g = torch.Generator("cpu").manual_seed(0)
    n = math.prod(grid) + prefix + suffix
    q, k, v, grad = (torch.randn(2, n, heads, d, generator=g, device="cpu") for heads in (4, 2, 2, 4))
    tokens = [t.to(device, dtype) for t in (size * q, k + 0.5, v)]
    places = {"grid": grid, "blocks": blocks, "radius": radius, "prefix": prefix, "suffix": suffix, "degree": 0}
    return tokens, grad.to(device), {**places, "q_scale": d**-0.5}


def grads(tokens, grad, run):
    x = [t.detach().clone().requires_grad_() for t in tokens]
    y = run(*x)
    return [y.detach(), *torch.autograd.grad((y * grad.to(y)).sum(), x)]


def impl(name, more):
    return lambda *x: hk.multipole(*x, **more, impl=name)
