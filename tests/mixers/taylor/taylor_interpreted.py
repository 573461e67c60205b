"""The Triton form of second-order Taylor attention against float64 in Triton's interpreter. Not collected:
`test_taylor_triton` runs it in its own process."""

from __future__ import annotations

import pytest
import torch

import hla_kernels as hk
from hla_kernels.softmax.taylor import fused
from tests.helpers.error_rule import relative_error
from tests.mixers.taylor.taylor_cases import make, torch_form, triton_form
from tests.ops.fused.cases import poison

HALF, FULL = torch.float16, torch.float32
# N, (B, H, Hk, D, Dv), dtype, normalize, inputs
CASES = [
    (37, (1, 2, 2, 16, 16), FULL, True, {}),
    (37, (2, 2, 1, 32, 16), FULL, False, {"mask": True}),
    (70, (1, 1, 1, 40, 40), FULL, True, {"layout": "strided"}),
    (70, (2, 2, 1, 72, 72), FULL, True, {"mask": True}),
    (70, (1, 1, 1, 72, 72), HALF, True, {"mean": 3.0}),
    (64, (1, 2, 2, 64, 64), HALF, True, {"size": 8.0, "mean": 0.0}),
    (70, (1, 1, 1, 64, 64), HALF, False, {}),
    (1, (1, 1, 1, 16, 16), FULL, True, {}),
    (37, (2, 4, 2, 32, 16), FULL, True, {"r": 16, "mask": True}),
    (70, (1, 2, 1, 40, 40), FULL, False, {"r": 9}),
    (70, (1, 1, 1, 72, 72), HALF, True, {"r": 24}),
]
# largest measured: float32 1e-6, float16 5e-4 (its eps is 1e-3)
TOLERANCE = {FULL: 2e-6, HALF: 1e-3}


def check(got, tensors, grad, mask, normalize, scale, tolerance):
    wanted = torch_form(tensors, grad, mask, normalize, scale, torch.float64)
    errors = [relative_error(x, y) for x, y in zip(got, wanted, strict=True) if bool(y.any())]
    assert len(errors) >= 2 and all(e <= tolerance for e in errors), errors


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x) for x in (c[0], *c[1], c[3], *c[4])))
def test_matches_float64(monkeypatch, case):
    n, sizes, dtype, normalize, more = case
    tensors, grad, mask = make(n, sizes, dtype, **more)
    got = triton_form(monkeypatch, tensors, grad, mask, normalize, 0.3)
    check(got, tensors, grad, mask, normalize, 0.3, TOLERANCE[dtype])
    if mask is not None:
        assert not any(bool(x[~mask].any()) for x in got[:4])


def test_through_the_custom_operators(monkeypatch):
    """q, k, v and packed give the same bits, with gradients, from an expanded gradient, saved or not; no rows."""
    ops = torch.ops.hla_kernels
    qkv = torch.randn(1, 21, 3, 2, 16, requires_grad=True)
    c = [torch.rand(2, 2).requires_grad_() for _ in range(2)]
    c[1].data.copy_(c[0].data)
    tokens = [x.detach().requires_grad_() for x in qkv.unbind(2)]
    with monkeypatch.context() as patch:
        poison(patch)
        y = ops.taylor2(*tokens, c[0], None, None, None, True, 0.3, "triton", False)[0]
        z = ops.taylor2_qkvpacked(qkv, c[1], None, True, 0.3, "triton", True)[0]
        y.sum().backward()
        z.sum().backward()
    assert torch.equal(y, z) and torch.equal(torch.stack([x.grad for x in tokens], 2), qkv.grad)
    assert torch.equal(c[0].grad, c[1].grad)
    empty = ops.taylor2(*[x[:0] for x in tokens], c[0], None, None, None, True, 0.3, "triton", True)
    assert empty[0].shape == (0, 21, 2, 16)
    torch.library.opcheck(ops.taylor2_qkvpacked, (qkv, c[0], None, True, 0.3, "triton", True))
    narrow = [x.detach()[..., 2:7].clone().requires_grad_() for x in tokens[:2]]
    torch.library.opcheck(ops.taylor2, (*tokens, c[0], *narrow, None, True, 0.3, "triton", True))
    y, saved = ops.taylor2(*tokens, c[0], None, None, None, False, 0.3, "triton", True)
    assert not torch.equal(y, z) and bool(saved.isfinite().all())
    torch.autograd.grad(y.sum(), tokens)  # without the ratio o is not kept


def test_why_not():
    """What the Triton form refuses, in words."""
    q = torch.randn(1, 20, 2, 32, dtype=HALF)
    assert fused.why_not(q, q, q, None, None) is None
    refused = ((q.float(), "float32"), (q[..., :8], "D = 8"), (q.mT.contiguous().mT, "not contiguous"))
    for x, reason in refused:
        assert reason in fused.why_not(x, x, x, None, None)
    wide = torch.cat((q, q), 3)
    assert "R = 64 is outside 1..D = 32" in fused.why_not(q, q, q, wide, wide)
    assert fused.why_not(q, q, q, q[..., :5], q[..., :5]) is None
    explained = hk.explain("taylor2", q, q, q, torch.ones(2, 2))
    assert explained.impl == "torch" and "CUDA" in explained.why_not["triton"]
