"""Inputs and forced calls of the tests of the Triton form of block mixing."""

from __future__ import annotations

import torch
from torch import Tensor

from hla_kernels.blockmix import fused
from hla_kernels.blockmix.layout import BlockOptions, Layout
from hla_kernels.blockmix.torch_form import evaluate, gradient
from hla_kernels.features import feature, feature_grad, mapped
from tests.ops.fused.cases import poison

NAMES = ("o", "dq", "dk", "dv", "dmixing")


def options_of(grid, blocks, prefix=0, **options) -> BlockOptions:
    """Options of a call over a grid."""
    return BlockOptions(Layout(grid, blocks, prefix), **options)


def make(o: BlockOptions, sizes, dtype, *, device="cpu", layout="packed", heads=False, mask=False, mean=0.0, group=1,
         positive=False):  # fmt: skip
    """(q, k, v, mixing), the output's gradient and a mask or None; sizes (B, H, D, Dv), `group` heads share a key head.
    Values have a mean; positive: queries and keys are.
    Layouts: views of a packed qkv, "strided": [B, H, N, D] seen as [B, N, H, D], or "ones": the same, with an expanded
    vector of ones as values, as in denominators."""
    (b, h, d, dv), n, m = sizes, o.layout.n_tokens, o.layout.n_blocks
    g = torch.Generator(device).manual_seed(n + d)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device)

    if layout == "packed" and d == dv and group == 1:
        q, k, v = draw(b, n, 3, h, d).to(dtype).unbind(2)
        v += mean
    else:
        parts = ((h, d, 0), (h // group, d, 0), (h // group, dv, mean))
        q, k, v = ((draw(b, heads_, n, w) + more).to(dtype).transpose(1, 2) for heads_, w, more in parts)
    if layout == "ones":
        v = v.new_ones(dv).expand_as(v)
    if positive:
        q.abs_(), k.abs_()
    mixing = torch.rand((h, m, m) if heads else (m, m), generator=g, device=device)
    keep = torch.rand(b, n, generator=g, device=device) < 0.7 if mask else None
    grad = draw(b, n, h, dv).to(dtype)
    if keep is not None:
        for x in (q, k, v, grad):
            x[~keep] = float("nan")
    return (q, k, v, mixing), grad, keep


def angles_of(o: BlockOptions, sizes, device="cpu", per_head=False) -> tuple[Tensor, Tensor]:
    """Rotary tables (cos, sin), [N, D / 2] or [N, H, D / 2]."""
    (_, h, d, _), n = sizes, o.layout.n_tokens
    g = torch.Generator(device).manual_seed(n)
    angles = 6 * torch.rand(*((n, h) if per_head else (n,)), d // 2, generator=g, device=device)
    return angles.cos(), angles.sin()


def torch_form(o: BlockOptions, tensors, grad, mask, dtype, rotary=None) -> list[Tensor]:
    """o, dq, dk, dv, dmixing of the torch form in a dtype; mixing is at least float32."""
    x = [t.to(dtype) for t in tensors[:3]]
    x.append(tensors[3].to(torch.float64 if dtype == torch.float64 else torch.float32))
    return [evaluate(*x, o, mask, rotary), *gradient(grad.to(dtype), *x, o, mask, rotary)]


def features_read(name: str | None, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """phi(q) and phi(k) as the kernels read them: evaluated in float32, and rounded to the dtype of the tokens.

    Of float64 values, one of 10^5 is rounded to the other side, by which d mixing differs by 2e-5.
    """
    read = mapped.features(name, q, k, q.new_empty(0, dtype=torch.float32))[1]
    info = torch.finfo(q.dtype)
    for x, found in zip((q, k), read, strict=True):
        exact, found = feature(x.double(), name), found.double()
        error, size = (found - exact).abs(), torch.maximum(found.abs(), exact.abs())
        assert (error <= (info.eps / 2 + 2**-20) * size + info.tiny * info.eps / 2)[exact.isfinite()].all()
    return read


def truth(o: BlockOptions, tensors, grad, mask, rotary=None) -> list[Tensor]:
    """The same of the torch form in float64, of features as the kernels read them."""
    tokens, name = [x.double() for x in tensors[:2]], o.feature_map
    read = features_read(name, *tensors[:2])
    plain = o._replace(feature_map=None if name is None else "identity")
    y, *grads, dv, dm = torch_form(plain, (*read, *tensors[2:]), grad, mask, torch.float64, rotary)
    grads = [feature_grad(x, feature(x, name), g, name) for x, g in zip(tokens, grads, strict=True)]
    if mask is not None:
        grads = [g.masked_fill(~mask[:, :, None, None], 0) for g in grads]
    return [y, *grads, dv, dm]


def triton_form(monkeypatch, o: BlockOptions, tensors, grad, mask, rotary=None) -> list[Tensor]:
    """The same of the Triton form; every buffer starts as NaN."""
    with monkeypatch.context() as patch:
        poison(patch)
        y, saved = fused.forward(*tensors, o, mask, rotary, save=True)
        new = torch.zeros if mask is not None else torch.empty
        outs = tuple(new(x.shape, dtype=x.dtype, device=x.device) for x in tensors[:3])
        dm = fused.backward(grad, *tensors, o, mask, rotary, outs, saved)
    return [y, *outs, dm]
