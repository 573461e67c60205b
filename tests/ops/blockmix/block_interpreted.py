"""The Triton form of block mixing against float64 in Triton's interpreter. Not collected: `test_block_triton` runs it
in its own process."""

from __future__ import annotations

import pytest
import torch

import hla_kernels as hk
from hla_kernels.blockmix import fused
from hla_kernels.blockmix.frames import every_frame, mixing_of_frames
from hla_kernels.blockmix.fused import launch, plan, spec
from hla_kernels.blockmix.reference import reference
from tests.helpers.error_rule import relative_error
from tests.ops.blockmix.fused_cases import angles_of, make, options_of, torch_form, triton_form, truth
from tests.ops.fused.cases import poison

HALF, FULL = torch.float16, torch.float32
PLAIN, BARE = {"feature_map": None, "normalize": False}, {"normalize": False}
EXACT = {"moments": "float32"}
# grid, blocks, prefix, options, (B, H, D, Dv), dtype, inputs ("turned": with rotary tables, "own": of each query head)
CASES = [
    ((5, 7), (2, 1), 1, {}, (2, 1, 16, 16), FULL, {}),
    ((3, 4, 5), (2, 2, 1), 0, BARE, (1, 1, 32, 32), HALF, {"mask": True}),
    ((3, 4, 5), (1, 1, 3), 3, {**PLAIN, "scale": 0.2}, (1, 1, 32, 48), FULL, {"layout": "strided"}),
    ((5, 6), (2, 1), 0, PLAIN, (1, 2, 32, 16), FULL, {"layout": "ones", "positive": True}),
    ((37,), (2,), 0, {}, (1, 2, 40, 40), HALF, {"mask": True, "heads": True, "mean": 1.0}),
    ((5, 6), (2, 1), 0, {}, (1, 1, 72, 72), HALF, {"mean": 1.0}),
    ((5, 6), (2, 1), 1, {"feature_map": "elu1"}, (1, 1, 16, 16), HALF, {"turned": True, "mask": True}),
    ((5, 6), (1, 2), 0, {"rotary_half": True, **EXACT}, (1, 2, 16, 16), HALF, {"turned": True, "group": 2}),
    ((5, 6), (1, 2), 0, {}, (1, 2, 16, 16), FULL, {"turned": "own", "group": 2}),
    ((5, 6), (2, 1), 0, {**BARE, "order": "ahla"}, (1, 4, 16, 16), FULL, {"turned": "own", "group": 2}),
    ((5, 6), (2, 1), 0, {**BARE, "order": "hla2"}, (1, 2, 16, 16), FULL, {"turned": "own", "group": 2}),
    ((5, 6), (2, 1), 1, {"feature_map": "softmax"}, (1, 2, 40, 16), HALF, {"mask": True, "mean": 1.0}),
    ((5, 6), (2, 1), 0, {"feature_map": "softmax", **BARE}, (1, 1, 16, 16), FULL, {"turned": True, "mean": 1.0}),
    ((5, 6), (2, 1), 1, {"order": "ahla"}, (1, 2, 16, 16), HALF, {"heads": True, "group": 2}),
    ((5, 6), (2, 1), 0, {**BARE, "order": "ahla"}, (1, 1, 16, 16), FULL, {"turned": True}),
    ((5, 6), (2, 1), 0, {"order": "hla2"}, (1, 1, 16, 48), HALF, {"mask": True, "mean": 1.0}),
    ((5, 6), (2, 1), 1, {**BARE, "order": "hla2", "feature_map": "elu1"}, (1, 1, 16, 16), FULL, {"turned": True}),
]
# largest measured: float32 3e-7, float16 4e-4 (its eps is 1e-3)
TOLERANCE = {FULL: 1e-6, HALF: 8e-4}


def check(o, got, tensors, grad, mask, tolerance, rotary=None):
    errors = [relative_error(x, y) for x, y in zip(got, truth(o, tensors, grad, mask, rotary), strict=True)]
    assert all(e <= tolerance for e in errors), errors


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x) for x in (c[0], *c[3].values(), c[4][2])))
def test_matches_float64(monkeypatch, case):
    grid, blocks, prefix, options, sizes, dtype, more = case
    o = options_of(grid, blocks, prefix, **options)
    rotary = angles_of(o, sizes, per_head=more["turned"] == "own") if more.get("turned") else None
    tensors, grad, mask = make(o, sizes, dtype, **{name: x for name, x in more.items() if name != "turned"})
    got = triton_form(monkeypatch, o, tensors, grad, mask, rotary)
    check(o, got, tensors, grad, mask, TOLERANCE[dtype], rotary)
    if o.moments == "float32":
        exact = torch_form(o, tensors, grad, mask, torch.float64, rotary)[4]
        assert relative_error(got[4], exact) <= 3e-6  # measured 1.3e-6
    if mask is not None:
        assert not any(bool(x[~mask].any()) for x in got[:4])


@pytest.mark.parametrize(
    ("options", "dtype", "turned", "more"),
    [({}, FULL, False, {"heads": True}), (PLAIN, HALF, True, {"group": 2}), ({"scale": 0.3}, HALF, True, {})],
    ids=str,
)
def test_frames(monkeypatch, options, dtype, turned, more):
    """causal="frame" as mixing of the blocks of all frames, with gradients, against its definition."""
    o, sizes = options_of((3, 4, 5), (1, 2, 2), causal="frame", **options), (1, 2, 16, 16)
    tensors, grad, _ = make(o, sizes, dtype, **more)
    rotary = angles_of(o, sizes) if turned else None
    x = [t.detach().double().requires_grad_() for t in tensors]
    truth = reference(*x, o, None, rotary)
    m = tensors[3].requires_grad_()
    mixing = mixing_of_frames(m, 3)
    wide = (*tensors[:3], mixing.detach())
    got = triton_form(monkeypatch, every_frame(o), wide, grad, None, rotary)
    got[4] = torch.autograd.grad(mixing, m, got[4].to(m))[0]
    truth = [truth.detach(), *torch.autograd.grad(truth, x, grad.double())]
    errors = [relative_error(a, b) for a, b in zip(got, truth, strict=True)]
    assert all(e <= TOLERANCE[dtype] for e in errors), errors


@pytest.mark.parametrize("order", ("la", "ahla", "hla2"))
def test_ratio_of_any_scale(monkeypatch, order):
    """1 over a denominator is more than 65504, the largest number of float16: the scale cancels."""
    o = options_of((5, 6), (2, 1), 1, order=order, scale=2.0**-28, eps=0.0)
    inputs = make(o, (1, 2, 16, 16), HALF, positive=True)
    check(o, triton_form(monkeypatch, o, *inputs), *inputs, TOLERANCE[HALF])


def test_several_parts_of_a_block(monkeypatch):
    """The same bits twice, from sums over parts of a block and parts of the columns of a moment."""
    monkeypatch.setattr(plan, "reduce_parts", lambda programs, widest, bn: (-(-widest // 32), 32))
    monkeypatch.setattr(plan, "apply_parts", lambda programs, widest, bn: (-(-widest // bn), bn))
    o = options_of((5, 15), (1, 2))
    inputs = make(o, (1, 1, 32, 32), FULL)
    first, second = (triton_form(monkeypatch, o, *inputs) for _ in range(2))
    check(o, first, *inputs, TOLERANCE[FULL])
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("turned", [False, True])
def test_programs_that_divide_the_features(monkeypatch, turned):
    """Two programs per block compute gradients of wide queries, each for half of the features, also rotated ones."""
    o, sizes = options_of((5, 6), (2, 1), 1, **BARE), (1, 2, 128, 48)
    inputs, rotary = make(o, sizes, HALF, mean=1.0, mask=True), angles_of(o, sizes) if turned else None
    check(o, triton_form(monkeypatch, o, *inputs, rotary), *inputs, TOLERANCE[HALF], rotary)


@pytest.mark.parametrize("parts", [1, 2])
def test_anchor_of_padded_samples(monkeypatch, parts):
    """The mean of the real tokens: with a smaller one, what is left of similar values cancels in dq."""
    o = options_of((5, 8), (2, 2), 0)
    (q, k, v, mixing), _, mask = make(o, (2, 2, 16, 16), FULL, mask=True, mean=1.0)
    monkeypatch.setattr(plan, "anchor_parts", lambda n, heads, bn: (parts, n if parts == 1 else bn))
    found = torch.full((2, 2, 16), float("nan"))
    launch.anchor_of(launch.Call(q, k, v, mixing, o, mask, None), found.view(4, 16))
    mean = torch.stack([x[keep].mean(0) for x, keep in zip(v.double(), mask, strict=True)])
    assert relative_error(found, mean) <= TOLERANCE[FULL]


def test_queries_without_features(monkeypatch):
    """Their denominator is eps: in float16 it must not set the unit of the others, nor leave the range."""
    o = options_of((5, 8), (2, 2), 0)
    (q, *rest), grad, _ = make(o, (1, 2, 16, 16), HALF)
    q[:, ::7] = -q[:, ::7].abs()
    check(o, triton_form(monkeypatch, o, (q, *rest), grad, None), (q, *rest), grad, None, TOLERANCE[HALF])


def test_more_blocks_than_a_tile(monkeypatch):
    o = options_of((18,), (18,), 0, normalize=False)
    inputs = make(o, (1, 1, 16, 16), FULL)
    check(o, triton_form(monkeypatch, o, *inputs), *inputs, TOLERANCE[FULL])


@pytest.mark.parametrize(("blocks", "options"), [(7, {}), (40, BARE)], ids=str)
def test_moments_as_wide_as_tokens(monkeypatch, blocks, options):
    """As of bfloat16 tokens, of which float16 stands in for the rounded moments: `blockmix_mix`."""
    monkeypatch.setattr(spec, "moments_dtype", lambda *a: HALF)
    o = options_of((40,), (blocks,), 0, **options)
    inputs = make(o, (1, 1, 16, 16) if blocks == 40 else (2, 2, 16, 32), HALF, mean=1.0, heads=blocks == 7)
    check(o, triton_form(monkeypatch, o, *inputs), *inputs, TOLERANCE[HALF])


def test_through_the_custom_operators(monkeypatch):
    """q, k, v and packed give the same bits, with gradients, from an expanded gradient, saved or not; no rows."""
    ops = torch.ops.hla_kernels
    where = (None, None, None, "la", [4, 5], [1, 2], 1)
    rest = (*where, "relu", True, False, None, 1.0, 1e-6, False, "bfloat16", "triton")
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
    for x, rotary in ((q, None), (q.float(), None), (q, (q, q))):
        assert fused.why_not(x, x[:, :, :1], x[:, :, :1], o, rotary) is None
    refused = (
        (q.double(), o, "float64"), (q[..., :8], o, "D = 8"), (q, o._replace(causal=True), "causal"),
        (q, every_frame(options_of((300, 2, 2), (1, 2, 2), causal="frame")), "1200 blocks"),
        (q, o._replace(feature_map="softmax_pair"), "'softmax_pair'"), (q, options_of((2000,), (1200,)), "1200 blocks"),
        (q.transpose(1, 3).contiguous().transpose(1, 3), o, "not contiguous"),
    )  # fmt: skip
    for x, options, reason in refused:
        assert reason in fused.why_not(x, x, x, options, None)
    assert "ratio of order 'ahla'" in fused.why_not(q, q, q, o._replace(order="ahla"), (q, q))
    wide = torch.randn(1, 20, 2, 48)
    assert "no power of two" in fused.why_not(wide, wide, wide, o._replace(rotary_half=True), (q, q))
    explained = hk.explain("mhla", q, q, q, torch.ones(4, 4), grid=(4, 5), blocks=(2, 2))
    assert explained.impl == "torch" and "CUDA" in explained.why_not["triton"]


FEW = {"feature_map": None}
PAIRS = [
    ((5, 7), (2, 1), 1, FEW, (2, 2, 16, 16), FULL, {"mean": 1.0, "positive": True}),
    ((3, 4, 6), (2, 2, 1), 0, {**PLAIN, "scale": 0.2}, (1, 2, 40, 16), FULL, {"layout": "strided"}),
    ((5, 17), (2, 3), 2, FEW, (1, 2, 72, 72), HALF, {"heads": True, "mask": True, "mean": 1.0, "positive": True}),
    ((70,), (4,), 0, FEW, (1, 2, 32, 48), FULL, {"group": 2, "positive": True}),
    ((8, 9), (4, 9), 0, PLAIN, (1, 1, 32, 32), HALF, {"mask": True}),
]


@pytest.mark.parametrize("case", PAIRS, ids=lambda c: "-".join(str(x) for x in (c[0], *c[3].values(), c[4][2])))
def test_by_pairs(monkeypatch, case):
    """The form for few tokens, which no call of these dtypes takes by itself."""
    grid, blocks, prefix, options, sizes, dtype, more = case
    monkeypatch.setattr(fused, "by_pairs", lambda *a: True)
    o = options_of(grid, blocks, prefix, **options)
    tensors, grad, mask = make(o, sizes, dtype, **more)
    got = triton_form(monkeypatch, o, tensors, grad, mask)
    check(o, got, tensors, grad, mask, TOLERANCE[dtype])
    if mask is not None:
        assert not any(bool(x[~mask].any()) for x in got[:4])
