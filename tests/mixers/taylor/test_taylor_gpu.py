"""Triton form of Taylor attention on a CUDA device, against float64 and the torch form.

Allowed error: relative L2 against the torch form in float64, at most twice the error of the torch form in the dtype of
the call, for the output and every gradient. The gradient of the coefficients is two float32 sums per head, whose errors
vary: hence many heads. Scores of 8 multiply the rounding errors of tensor cores by 8, and the sums are a hundredth of
their terms: there the error may reach what rounding each term once to float32 causes (`rounding_of_terms`, 6.9e-6 here;
an H200 had 4.2e-6). Every buffer of the Triton form starts as NaN.
"""

from __future__ import annotations

import pytest
import torch

import hla_kernels as hk
from tests.helpers.error_rule import relative_error
from tests.mixers.taylor.taylor_cases import NAMES, make, rounding_of_terms, torch_form, triton_form
from tests.ops.fused.cases import poison

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton form needs a CUDA device: none here"),
]

BF16, FP16 = torch.bfloat16, torch.float16
# N, (B, H, Hk, D, Dv), normalize, inputs
CASES = [
    *((n, (2, 16, 16, d, d), True, {}) for d in (16, 32, 64, 72, 80, 96, 128) for n in (37, 197, 1024)),
    *((n, (2, 16, 16, d, d), False, {}) for d in (40, 64, 72) for n in (197, 1000)),
    *((300, (2, 16, 16, d, d), True, {"mask": True}) for d in (32, 64, 72, 128)),
    (300, (2, 18, 6, 64, 32), True, {}),
    (300, (2, 18, 6, 72, 128), False, {"mask": True}),
    (256, (2, 16, 16, 64, 64), True, {"layout": "strided", "kept": BF16}),
    (256, (2, 16, 16, 64, 64), True, {"size": 8.0, "mean": 3.0}),
    (1, (2, 2, 2, 64, 64), True, {}),
    (4097, (1, 16, 16, 64, 64), True, {}),
    *((n, (2, 16, 16, d, d), True, {"r": 16}) for d in (32, 64, 128) for n in (197, 1024)),
    (300, (2, 16, 16, 72, 72), True, {"r": 24, "mask": True}),
    (300, (2, 18, 6, 64, 32), False, {"r": 9}),
    (1, (2, 2, 2, 64, 64), True, {"r": 16}),
]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x) for x in (c[0], *c[1], c[2], *c[3])))
def test_error_and_bits(monkeypatch, case, dtype):
    n, sizes, normalize, more = case
    tensors, grad, mask = make(n, sizes, dtype, device="cuda", **more)
    scale = sizes[3] ** -0.5
    truth, plain = (torch_form(tensors, grad, mask, normalize, scale, x) for x in (torch.float64, dtype))
    first, second = (triton_form(monkeypatch, tensors, grad, mask, normalize, scale) for _ in range(2))
    for name, (a, b, c, t) in zip(NAMES, zip(first, second, plain, truth, strict=True), strict=False):
        assert torch.equal(a, b), name
        if not bool(t.any()):  # the gradients of a single query and key
            assert float(a.abs().max()) <= 1e-6, name
            continue
        limit = 2 * relative_error(c.to(a.dtype), t)
        if name == "dcoefficients" and more.get("size", 1.0) > 1.0:
            limit = rounding_of_terms(tensors, grad, scale)
        assert relative_error(a, t) <= limit, (name, relative_error(a, t), limit)
    if mask is not None:
        assert not any(bool(x[~mask].any()) for x in (*first[:4], *first[5:]))


def call(tensors, **options):
    """o, dq, dk, dv, dcoefficients of the public operator; the gradient is ones."""
    x = [t.detach().requires_grad_() for t in tensors]
    y = hk.taylor2(*x, q_scale=0.125, **options)
    return [y.detach(), *torch.autograd.grad(y.sum(), x)]


def test_packed_compile_autocast_and_capture(monkeypatch):
    """One packed gradient, a full graph, autocast and a replay have the bits of the plain call."""
    (*tensors, _, _), _, _ = make(274, (2, 4, 4, 64, 64), BF16, device="cuda")
    expected = call(tensors, impl="triton")
    assert hk.explain("taylor2", *tensors).impl == "triton"
    qkv, c = torch.stack(tensors[:3], 2).requires_grad_(), tensors[3].clone().requires_grad_()
    with monkeypatch.context() as patch:
        poison(patch)
        y = hk.taylor2_qkvpacked(qkv, c, q_scale=0.125)
        y.sum().backward()
    found = [y, *qkv.grad.unbind(2), c.grad]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    compiled = torch.compile(lambda *x: hk.taylor2(*x, q_scale=0.125), fullgraph=True, backend="aot_eager")
    x = [t.detach().requires_grad_() for t in tensors]
    y = compiled(*x)
    found = [y, *torch.autograd.grad(y.sum(), x)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with torch.autocast("cuda", dtype=BF16):
        assert torch.equal(hk.taylor2(*[t.float() for t in tensors[:3]], tensors[3], q_scale=0.125), expected[0])
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    x = [t.detach().requires_grad_() for t in tensors]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # autograd's nodes belong to the stream of their first use
        torch.autograd.grad(hk.taylor2(*x, q_scale=0.125).sum(), x)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        y = hk.taylor2(*x, q_scale=0.125)
        found = [y, *torch.autograd.grad(y.sum(), x)]
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_opcheck():
    for r in (0, 16):
        tensors, _, _ = make(70, (2, 2, 2, 32, 32), BF16, device="cuda", r=r)
        x = [None if t is None else t.detach().requires_grad_() for t in tensors]
        torch.library.opcheck(torch.ops.hla_kernels.taylor2, (*x, None, True, 0.2, "triton", True))


def test_refusals():
    (q, k, v, c, _, _), _, _ = make(40, (1, 2, 2, 32, 32), BF16, device="cuda")
    for x, options, reason in (
        ((q.float(), k.float(), v.float()), {}, "float32"),
        ((q, k, v), {"narrow": (torch.cat((q, q), 3), torch.cat((k, k), 3))}, "narrow pair"),
    ):
        explained = hk.explain("taylor2", *x, c, **options)
        assert explained.impl == "torch" and reason in explained.why_not["triton"]
        with pytest.raises(ValueError, match=reason):
            hk.taylor2(*x, c, impl="triton", **options)
