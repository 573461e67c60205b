"""Block mixing in Triton through the public operator on a CUDA device, against float64 and the torch form.

Rule of the error: relative L2 against the torch form in float64, at most twice that of the torch form in the dtype of
the call. o, dq, dk, dv keep it, and d mixing does with moments="float32". Without, the Triton form takes it from
moments or operators rounded to the dtype of the tokens: it is held to the rule against a mixing of that dtype. Every
buffer of the Triton form starts as NaN.
"""

from __future__ import annotations

import pytest
import torch

import hla_kernels as hk
from hla_kernels.blockmix import fused
from hla_kernels.dispatch import recording
from tests.helpers.error_rule import LIMITS, relative_error
from tests.ops.blockmix.fused_cases import NAMES, angles_of, make, options_of, torch_form, triton_form, truth
from tests.ops.fused.cases import poison, twice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton form needs a CUDA device: none here"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FEW, BARE, ELU1 = {"feature_map": None}, {"normalize": False}, {"feature_map": "elu1"}
PLAIN = {**FEW, **BARE}
SOFTMAX = {"feature_map": "softmax"}
EXACT, AHLA, HLA2 = {"moments": "float32"}, {"order": "ahla"}, {"order": "hla2"}
WAN = ((21, 30, 50), (7, 3, 5), 0)
# grid, blocks, prefix, options, (B, H, D, Dv), dtype, inputs ("turned": rotary tables, of one or of all heads; "pairs":
# the form for few tokens)
CASES = [
    ((7, 9), (2, 3), 1, {}, (2, 2, 32, 32), BF16, {}),
    ((21, 30, 50), (7, 3, 5), 0, {}, (1, 2, 128, 128), BF16, {}),
    ((21, 30, 52), (3, 5, 10), 0, BARE, (1, 2, 128, 128), BF16, {"mean": 1.0}),
    ((32, 33), (4, 5), 3, {}, (2, 4, 64, 64), BF16, {"heads": True, "mean": 1.0}),
    ((32, 32), (4, 4), 0, PLAIN, (4, 6, 64, 64), BF16, {"layout": "strided"}),
    (*WAN, PLAIN, (1, 2, 128, 16), BF16, {"layout": "ones", "positive": True}),
    ((32, 33), (4, 5), 0, {}, (2, 4, 72, 72), BF16, {"mean": 1.0}),
    ((1000,), (3,), 0, PLAIN, (2, 2, 64, 48), BF16, {"mask": True}),
    ((64, 64), (1, 2), 0, {}, (1, 1, 128, 128), BF16, {"mean": 1.0}),
    ((200,), (200,), 0, {}, (2, 2, 64, 64), BF16, {}),
    ((37, 41), (3, 4), 5, {}, (2, 2, 72, 72), FP16, {"heads": True, "mask": True}),
    ((37, 41), (3, 4), 5, PLAIN, (2, 2, 64, 64), FP16, {}),
    ((14, 14), (2, 7), 1, FEW, (4, 6, 64, 64), BF16, {"mean": 1.0, "pairs": True, "positive": True}),
    ((14, 14), (4, 4), 1, FEW, (2, 6, 64, 64), BF16, {"heads": True, "mean": 2.0, "pairs": True, "positive": True}),
    ((14, 14), (7, 2), 1, ELU1, (2, 4, 64, 64), BF16, {"heads": True, "mean": 1.0}),
    ((16, 16), (4, 4), 0, PLAIN, (2, 4, 72, 72), BF16, {"mask": True, "pairs": True}),
    ((16, 16), (8, 8), 0, FEW, (2, 4, 72, 48), BF16, {"group": 2, "pairs": True, "positive": True}),
    ((20, 20), (5, 4), 0, PLAIN, (1, 2, 128, 128), BF16, {"layout": "strided", "pairs": True}),
    ((12, 12), (3, 4), 0, SOFTMAX, (1, 4, 128, 128), BF16, {"mean": 1.0}),
    ((600,), (600,), 0, {}, (1, 4, 64, 64), BF16, {"group": 2, "mean": 1.0}),
    ((32, 33), (4, 5), 3, {}, (2, 4, 64, 64), FP32, {}),
    ((32, 33), (4, 5), 3, {**AHLA, **ELU1}, (1, 2, 64, 64), FP32, {}),
    (*WAN, {}, (1, 2, 128, 128), BF16, {"turned": "one"}),
    (*WAN, BARE, (1, 2, 128, 128), BF16, {"turned": "one"}),
    ((32, 33), (4, 5), 3, {**ELU1}, (2, 4, 64, 64), BF16, {"turned": "all", "mean": 1.0}),
    ((32, 33), (4, 5), 0, {"rotary_half": True}, (2, 4, 64, 64), BF16, {"turned": "one", "group": 4}),
    ((32, 33), (4, 5), 0, {}, (1, 2, 72, 72), FP16, {"turned": "one", "mask": True}),
    ((32, 33), (4, 5), 3, ELU1, (2, 4, 64, 64), BF16, {"mean": 1.0}),
    ((32, 33), (4, 5), 3, {**ELU1, **BARE}, (2, 2, 72, 72), BF16, {}),
    (*WAN, ELU1, (1, 2, 128, 128), BF16, {}),
    ((32, 33), (4, 5), 3, SOFTMAX, (2, 4, 64, 64), BF16, {"mean": 1.0}),
    (*WAN, {**SOFTMAX, **BARE}, (1, 2, 128, 128), BF16, {"turned": "one"}),
    ((32, 33), (4, 5), 0, {**SOFTMAX, **BARE}, (2, 2, 72, 72), BF16, {"mean": 1.0}),
    ((32, 33), (4, 5), 0, SOFTMAX, (1, 2, 72, 72), FP16, {"mask": True, "group": 2, "mean": 1.0}),
    (*WAN, {**SOFTMAX, **EXACT}, (1, 2, 128, 128), BF16, {"turned": "one"}),
    ((32, 32), (4, 4), 0, EXACT, (2, 4, 64, 64), BF16, {}),
    (*WAN, {**EXACT, **ELU1}, (1, 2, 128, 128), BF16, {}),
    ((32, 33), (4, 5), 3, {**EXACT, **BARE}, (2, 4, 72, 72), BF16, {"turned": "one", "mean": 1.0}),
    *(
        (*where, {**order, **more}, sizes, dtype, inputs)
        for order in (AHLA, HLA2)
        for where, more, sizes, dtype, inputs in (
            (WAN, ELU1, (1, 2, 128, 128), BF16, {"mean": 1.0}),
            (WAN, BARE, (1, 2, 128, 128), BF16, {"turned": "one"}),
            (((32, 33), (4, 5), 3), {}, (2, 4, 64, 64), BF16, {"mean": 1.0, "group": 2}),
            (((32, 33), (4, 5), 0), PLAIN, (2, 2, 72, 48), BF16, {"mask": True}),
            (((32, 33), (4, 5), 3), {}, (2, 4, 64, 64), FP16, {"heads": True}),
            (((32, 33), (4, 5), 3), EXACT, (2, 4, 64, 64), BF16, {}),
        )
    ),
]


def title(case) -> str:
    grid, _, _, options, sizes, dtype, more = case
    return "-".join(str(x) for x in (grid, *options.values(), sizes[2], dtype, *more))


@pytest.mark.parametrize("case", CASES, ids=title)
def test_error_and_bits(monkeypatch, case):
    grid, blocks, prefix, options, sizes, dtype, more = case
    o, turned = options_of(grid, blocks, prefix, **options), more.get("turned")
    rotary = angles_of(o, sizes, "cuda", turned == "all") if turned else None
    monkeypatch.setattr(fused, "by_pairs", lambda *a: "pairs" in case[-1])
    more = {name: x for name, x in more.items() if name not in ("turned", "pairs")}
    tensors, grad, mask = make(o, sizes, dtype, device="cuda", **more)
    exact, plain = (torch_form(o, tensors, grad, mask, x, rotary) for x in (torch.float64, dtype))
    if o.moments != "float32":
        plain[4] = plain[4].to(dtype)
    first, second = (triton_form(monkeypatch, o, tensors, grad, mask, rotary) for _ in range(2))
    rounded = "pairs" in case[-1] or o.feature_map == "elu1"
    read = truth(o, tensors, grad, mask, rotary)
    for name, a, b, c, t, e in zip(NAMES, first, second, plain, read, exact, strict=True):
        assert torch.equal(a, b), name
        errors = relative_error(a, t), relative_error(c, e)
        # by pairs the mixing matrix is rounded too, and gradients of elu + 1 twice: the error rule of all operators
        exactly = name == "dmixing" and o.moments == "float32"
        assert errors[0] <= (LIMITS[dtype] if rounded and not exactly else 2 * errors[1]), (name, *errors)
    if mask is not None:
        assert not any(bool(x[~mask].any()) for x in first[:4])


def call(tensors, **options):
    """o, dq, dk, dv, dmixing of the public operator; the gradient is ones."""
    x = [t.detach().requires_grad_() for t in tensors]
    y = hk.mhla(*x, **options)
    return [y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))]


WHERE = {"grid": (16, 17), "blocks": (3, 4), "prefix": 2}


@pytest.mark.parametrize("pairs", [False, True])
def test_packed_compile_autocast_and_capture(monkeypatch, pairs):
    """The repeated call, one packed gradient, a full graph, autocast and a replay have the bits of the plain call."""
    monkeypatch.setattr(fused, "by_pairs", lambda *a: pairs)
    monkeypatch.setattr(recording, "RECORDINGS", {})
    o = options_of(*WHERE.values())
    tensors, _, _ = make(o, (2, 4, 64, 64), BF16, device="cuda")
    expected, again = twice(call, tensors, impl="triton", **WHERE)
    assert all(recording.RECORDINGS.values()) and all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    assert hk.explain("mhla", *tensors, **WHERE).impl == "triton"
    qkv, mixing = torch.stack(tensors[:3], 2).requires_grad_(), tensors[3].clone().requires_grad_()
    with monkeypatch.context() as patch:
        poison(patch)
        y = hk.mhla_qkvpacked(qkv, mixing, **WHERE)
        y.sum().backward()
    found = [y, *qkv.grad.unbind(2), mixing.grad]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    compiled = torch.compile(lambda *x: hk.mhla(*x, **WHERE), fullgraph=True, backend="aot_eager")
    x = [t.detach().requires_grad_() for t in tensors]
    y = compiled(*x)
    found = [y, *torch.autograd.grad(y.sum(), x)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with torch.autocast("cuda", dtype=BF16):
        assert torch.equal(hk.mhla(*[t.float() for t in tensors[:3]], tensors[3], **WHERE), expected[0])
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    x = [t.detach().requires_grad_() for t in tensors]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # autograd's nodes belong to the stream of their first use
        torch.autograd.grad(hk.mhla(*x, **WHERE).sum(), x)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        y = hk.mhla(*x, **WHERE)
        found = [y, *torch.autograd.grad(y.sum(), x)]
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_opcheck():
    o = options_of(*WHERE.values())
    (q, k, v, mixing), _, _ = make(o, (2, 2, 32, 32), BF16, device="cuda")
    where = (None, None, None, "la", [16, 17], [3, 4], 2)
    rest = (*where, "relu", True, False, None, 1.0, 1e-6, False, "bfloat16", "triton", True)
    tensors = [t.detach().requires_grad_() for t in (q, k, v, mixing)]
    torch.library.opcheck(torch.ops.hla_kernels.mhla, (*tensors, *rest))


def test_refusals():
    o = options_of(*WHERE.values())
    (q, k, v, mixing), _, _ = make(o, (1, 2, 32, 32), BF16, device="cuda")
    tables = tuple(torch.ones(q.shape[1], 16, device="cuda") for _ in range(2))
    for x, options, reason in (
        ((q, k, v), {"order": "hla2", "rotary": tables}, "moments of its own"),
        ((q, k, v), {"feature_map": "softmax_pair"}, "'softmax_pair'"),
        ((q.double(), k.double(), v.double()), {}, "float64"),
    ):  # fmt: skip
        explained = hk.explain("mhla", *x, mixing, **WHERE, **options)
        assert explained.impl == "torch" and reason in explained.why_not["triton"]
        with pytest.raises(ValueError, match=reason):
            hk.mhla(*x, mixing, impl="triton", **WHERE, **options)


@pytest.mark.parametrize(("options", "turned"), [({}, False), ({}, True), (BARE, True), (ELU1, False)], ids=str)
def test_frames(options, turned):
    """causal="frame" takes the Triton form without a state, within the rule of the error; a state runs in torch."""
    layout, o = {"grid": (9, 20, 24), "blocks": (1, 2, 3)}, options_of((9, 20, 24), (1, 2, 3), causal="frame")
    tensors, grad, _ = make(o, (1, 2, 64, 64), BF16, device="cuda", mean=1.0)
    rotary = angles_of(o, (1, 2, 64, 64), "cuda") if turned else None
    given = {**layout, **options, "causal": "frame", "rotary": rotary}
    assert hk.explain("mhla", *tensors, **given).impl == "triton"
    assert hk.explain("mhla", *tensors, **given, return_state=True).impl == "torch"
    found = []
    for dtype, impl in ((BF16, "auto"), (BF16, "torch"), (torch.float64, "reference")):
        x = [t.detach().to(dtype).requires_grad_() for t in tensors[:3]]
        x.append(tensors[3].to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_())
        y = hk.mhla(*x, **given, impl=impl)
        found.append([y.detach(), *torch.autograd.grad(y, x, grad.to(dtype))])
    errors = [relative_error(a, b) for a, b in zip(found[0], found[2], strict=True)]
    assert max(errors) <= LIMITS[BF16], errors
