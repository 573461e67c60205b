"""The Triton form of block mixing against float64 in Triton's interpreter. Not collected: `test_block_triton` runs it
in its own process."""

from __future__ import annotations

import pytest
import torch

import hla_kernels as hk
from hla_kernels.blockmix import fused
from hla_kernels.blockmix.fused import plan
from tests.ops.blockmix.fused_cases import make, options_of, torch_form, triton_form
from tests.ops.fused.cases import poison, relative_error

HALF, FULL = torch.float16, torch.float32
PLAIN, BARE = {"feature_map": None, "normalize": False}, {"normalize": False}
# grid, blocks, prefix, options, (B, H, D, Dv), dtype, inputs
CASES = [
    ((5, 7), (2, 1), 1, {}, (2, 1, 16, 16), FULL, {}),
    ((3, 4, 5), (2, 2, 1), 0, BARE, (1, 1, 32, 32), HALF, {"mask": True}),
    ((3, 4, 5), (1, 1, 3), 3, {**PLAIN, "scale": 0.2}, (1, 1, 32, 48), FULL, {"layout": "strided"}),
    ((37,), (2,), 0, {}, (1, 2, 40, 40), HALF, {"mask": True, "heads": True, "mean": 1.0}),
    ((5, 6), (2, 1), 0, {}, (1, 1, 72, 72), HALF, {"mean": 1.0}),
]
# largest measured: float32 3e-7, float16 4e-4 (its eps is 1e-3)
TOLERANCE = {FULL: 1e-6, HALF: 8e-4}


def check(o, got, tensors, grad, mask, tolerance):
    errors = [relative_error(x, y) for x, y in zip(got, torch_form(o, tensors, grad, mask, torch.float64), strict=True)]
    assert all(e <= tolerance for e in errors), errors


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x) for x in (c[0], *c[3].values(), c[4][2])))
def test_matches_float64(monkeypatch, case):
    grid, blocks, prefix, options, sizes, dtype, more = case
    o = options_of(grid, blocks, prefix, **options)
    tensors, grad, mask = make(o, sizes, dtype, **more)
    got = triton_form(monkeypatch, o, tensors, grad, mask)
    check(o, got, tensors, grad, mask, TOLERANCE[dtype])
    if mask is not None:
        assert not any(bool(x[~mask].any()) for x in got[:4])


def test_several_parts_of_a_block(monkeypatch):
    """The same bits twice, from sums over parts of a block and parts of the columns of a moment."""
    monkeypatch.setattr(plan, "reduce_parts", lambda programs, widest, bn: (-(-widest // 32), 32))
    monkeypatch.setattr(plan, "apply_parts", lambda programs, widest, bn: (-(-widest // bn), bn))
    o = options_of((5, 15), (1, 2))
    inputs = make(o, (1, 1, 32, 32), FULL)
    first, second = (triton_form(monkeypatch, o, *inputs) for _ in range(2))
    check(o, first, *inputs, TOLERANCE[FULL])
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_more_blocks_than_a_tile(monkeypatch):
    o = options_of((18,), (18,), 0, normalize=False)
    inputs = make(o, (1, 1, 16, 16), FULL)
    check(o, triton_form(monkeypatch, o, *inputs), *inputs, TOLERANCE[FULL])


def test_through_the_custom_operators(monkeypatch):
    """q, k, v and packed give the same bits, with gradients, from an expanded gradient, saved or not; no rows."""
    ops = torch.ops.hla_kernels
    rest = (None, None, None, "la", [4, 5], [1, 2], 1, "relu", True, False, None, 1.0, 1e-6, False, "triton")
    qkv = torch.randn(1, 21, 3, 2, 16, requires_grad=True)
    mixing = [torch.rand(3, 3).requires_grad_() for _ in range(2)]
    mixing[1].data.copy_(mixing[0].data)
    tokens = [x.detach().requires_grad_() for x in qkv.unbind(2)]
    with monkeypatch.context() as patch:
        poison(patch)
        y, z = ops.mhla(*tokens, mixing[0], *rest, False)[0], ops.mhla_qkvpacked(qkv, mixing[1], *rest, True)[0]
        y.sum().backward()
        z.sum().backward()
    assert torch.equal(y, z) and torch.equal(torch.stack([x.grad for x in tokens], 2), qkv.grad)
    assert torch.equal(mixing[0].grad, mixing[1].grad)
    assert ops.mhla(*[x[:0] for x in tokens], mixing[0], *rest, True)[0].shape == (0, 21, 2, 16)
    torch.library.opcheck(ops.mhla_qkvpacked, (qkv, mixing[0], *rest, True))


def test_why_not():
    """What the Triton form refuses, in words."""
    o = options_of((4, 5), (2, 2))
    q = torch.randn(1, 20, 2, 32, dtype=HALF)
    assert fused.why_not(q, q, q, o, None) is None
    refused = (
        (q.float(), o, "float32"), (q[..., :8], o, "D = 8"), (q, o._replace(order="ahla"), "'ahla'"),
        (q, o._replace(causal=True), "causal"), (q, o._replace(feature_map="softmax"), "'softmax'"),
        (q, o._replace(feature_map="elu1"), "'elu1'"), (q, options_of((500,), (300,)), "300 blocks"),
        (q.transpose(1, 3).contiguous().transpose(1, 3), o, "not contiguous"),
    )  # fmt: skip
    for x, options, reason in refused:
        assert reason in fused.why_not(x, x, x, options, None)
    assert "rotary" in fused.why_not(q, q, q, o, (q, q))
    assert "share a key head" in fused.why_not(q, q[:, :, :1], q[:, :, :1], o, None)
    explained = hk.explain("mhla", q, q, q, torch.ones(4, 4), grid=(4, 5), blocks=(2, 2))
    assert explained.impl == "torch" and "CUDA" in explained.why_not["triton"]
