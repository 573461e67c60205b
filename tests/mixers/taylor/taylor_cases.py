"""Inputs and forced calls of the tests of the Triton form of second-order Taylor attention."""

from __future__ import annotations

import torch
from torch import Tensor

from hla_kernels.softmax.taylor import fused
from hla_kernels.softmax.taylor.gradient import gradient
from hla_kernels.softmax.taylor.torch_form import evaluate
from tests.ops.fused.cases import poison

NAMES = ("o", "dq", "dk", "dv", "dcoefficients", "dq2", "dk2")


def make(
    n, sizes, dtype, *, device="cpu", layout="packed", mask=False, mean=1.0, size=1.0, kept=torch.float32, r=0
):  # fmt: skip
    """(q, k, v, coefficients, q2, k2), the output's gradient and a mask or None; sizes (B, H, Hk, D, Dv), r: R of the
    narrow pair (0: q2 and k2 are None). Keys and values have a common mean, scores the given size; padding holds NaN.
    Layouts: views of a packed qkv where shapes allow, or "strided": [B, H, N, D] seen as [B, N, H, D]."""
    b, h, hk, d, dv = sizes
    g = torch.Generator(device).manual_seed(n + d)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device)

    if layout == "packed" and (h, d) == (hk, dv):
        qkv = draw(b, n, 3, h, d)
        qkv[:, :, 0] *= size
        qkv[:, :, 1:] += mean
        q, k, v = qkv.to(dtype).unbind(2)
    else:
        q, k, v = (
            (scale * (draw(b, heads, n, w) + more)).to(dtype).transpose(1, 2)
            for heads, w, more, scale in ((h, d, 0, size), (hk, d, mean, 1), (hk, dv, mean, 1))
        )
    c = (torch.rand(h, 2, generator=g, device=device) + 0.3).to(kept)
    c[0] = torch.tensor([1.0, 0.0])
    narrow = [None, None]
    if r:
        narrow = [draw(b, n, h, r).to(dtype), (draw(b, n, hk, r) + mean).to(dtype)]
    grad = draw(b, n, h, dv).to(dtype)
    keep = None
    if mask:
        keep = torch.rand(b, n, generator=g, device=device) < 0.7
        keep[-1] = False  # a sequence without tokens
        for x in (q, k, v, grad, *narrow):
            if x is not None:
                x[~keep] = float("nan")
    return (q, k, v, c, *narrow), grad, keep


def torch_form(tensors, grad, mask, normalize, scale, dtype) -> list[Tensor]:
    """o, dq, dk, dv, dcoefficients and, with a narrow pair, dq2 and dk2 of the torch form in a dtype; coefficients are
    at least float32."""
    q, k, v, c, q2, k2 = (None if t is None else t.to(dtype) for t in tensors)
    c = tensors[3].to(torch.float64 if dtype == torch.float64 else torch.float32)
    inputs = (q, k, v, c, q2, k2, mask, normalize, scale)
    found = [evaluate(*inputs), *gradient(grad.to(dtype), *inputs)]
    return [x for x in found if x is not None]


def terms_of_coefficients(tensors, grad, scale) -> Tensor:
    """[B, H, N, N, 2] in float64, what sums to the gradient of the coefficients over B and both N: r u s and
    r u s^2 / 2, s scores, u = g.(v - o), r = 1 / divisor (`fused.grads`). Ratio without a narrow pair or a mask."""
    q, k, v, c = (t.double() for t in tensors[:4])
    c1, c2 = (x[:, None, None] for x in c.unbind(1))
    s = scale * torch.einsum("bihd,bjhd->bhij", q, k - k.mean(1, keepdim=True))
    w = 1 + c1 * s + c2 * s**2 / 2
    r = 1 / w.mean(-1, keepdim=True)
    o = torch.einsum("bhij,bjhd->bihd", w * r / k.shape[1], v)
    u = torch.einsum("bihd,bjhd->bhij", grad.double(), v) - torch.einsum("bihd,bihd->bhi", grad.double(), o)[..., None]
    return torch.stack([r * u * s, r * u * s**2 / 2], -1) / k.shape[1]


def rounding_of_terms(tensors, grad, scale) -> float:
    """How far rounding each of these terms once to float32 may move the gradient, relative L2."""
    terms = terms_of_coefficients(tensors, grad, scale)
    return float(2**-24 * terms.abs().sum((0, 2, 3)).norm() / terms.sum((0, 2, 3)).norm())


def triton_form(monkeypatch, tensors, grad, mask, normalize, scale) -> list[Tensor]:
    """The same of the Triton form; every buffer starts as NaN."""
    with monkeypatch.context() as patch:
        poison(patch)
        o, saved = fused.forward(*tensors, mask, normalize, scale, True)
        q, k, v, _, *narrow = tensors
        outs = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, *narrow)]
        dc = fused.backward(grad, o, *tensors, mask, normalize, scale, outs, saved)
    return [x for x in (o, *outs[:3], dc, *outs[3:]) if x is not None]
