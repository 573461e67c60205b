"""The Triton forms of the two-sided operators as citizens of torch, on a CUDA device: packed and large tensors,
opcheck, compile, export, CUDA graphs, autocast, what they refuse."""

from __future__ import annotations

import pytest
import torch

import hla_kernels as hk
from tests.helpers.error_rule import check_tokens
from tests.helpers.fused_gpu import (
    ANCHORED,
    BF16,
    ELU_CENTRED,
    FP32,
    MANY,
    ODD,
    OPS,
    RATIO,
    RATIO_IDENTITY,
    SOFTMAX,
    make,
    results,
)
from tests.ops.fused.cases import kernel_names, poison

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton forms need a CUDA device: none here"),
]


@pytest.mark.parametrize("sizes", (MANY, ODD), ids=("heads", "split"))
def test_packed(monkeypatch, sizes):
    """One packed gradient with the bits of the three."""
    b, h, _, d, _ = sizes
    qkv = torch.randn(b, 197, 3, h, d, device="cuda", dtype=BF16, requires_grad=True)
    grad = torch.randn(b, 197, h, d, device="cuda", dtype=BF16)
    poison(monkeypatch)
    y = hk.hla2_qkvpacked(qkv, impl="triton", **ANCHORED)
    y.backward(grad)
    separate = results("hla2", qkv.detach().unbind(2), grad, impl="triton", **ANCHORED)
    assert torch.equal(y, separate[0]) and torch.equal(qkv.grad, torch.stack(separate[1:], 2))


@pytest.mark.parametrize(
    ("sizes", "samples"), (((2, 131072, 64, 128), 1), ((70000, 3, 2, 16), 1000)), ids=("tokens", "heads")
)
@pytest.mark.parametrize("op", OPS)
def test_large_tensors(op, sizes, samples):
    """The last head of the last samples, of 2**31 elements in each of q, k, v (addresses) and of 140000 heads
    (grids)."""
    b, n, h, d = sizes
    qkv = torch.randn(b, n, 3, h, d, device="cuda", dtype=BF16).requires_grad_()
    y = getattr(hk, f"{op}_qkvpacked")(qkv, impl="triton", **ANCHORED)
    grad = torch.randn_like(y)
    y.backward(grad)
    x, own = [t.detach() for t in qkv[-samples:, :, :, -1:].unbind(2)], grad[-samples:, :, -1:]
    truth = results(op, [t.double() for t in x], own.double(), impl="torch", **ANCHORED)
    found = [y[-samples:, :, -1:], *qkv.grad[-samples:, :, :, -1:].unbind(2)]
    check_tokens(found, truth)


def test_opcheck():
    ops, rest = torch.ops.hla_kernels, ("hla2", None, False, "k", True, 0.0, None, 1e-6, 1.0, "triton", False, True)
    x, _ = make(70, BF16, ODD)
    torch.library.opcheck(ops.two_sided, (*[t.detach().requires_grad_() for t in x], None, *rest))
    qkv = torch.randn(2, 70, 3, 2, 72, device="cuda", dtype=BF16, requires_grad=True)
    torch.library.opcheck(ops.two_sided_qkvpacked, (qkv, None, *rest))


@pytest.mark.parametrize("options", (ANCHORED, {"causal": True}), ids=("two-sided", "causal"))
def test_compile_and_export(options):
    """One full graph with a dynamic number of tokens, with gradients; export; the bits of the eager call."""
    x, grad = make(50, BF16, MANY)
    compiled = torch.compile(
        lambda *x: hk.ahla(*x, impl="triton", **options), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for n in (50, 197):
        x, grad = make(n, BF16, MANY)
        x = [t.detach().requires_grad_() for t in x]
        y = compiled(*x)
        got = [y, *torch.autograd.grad(y, x, grad)]
        assert all(
            torch.equal(a, b) for a, b in zip(got, results("ahla", x, grad, impl="triton", **options), strict=True)
        )

    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return hk.ahla(q, k, v, impl="triton", **options)

    n = torch.export.Dim("n", min=2, max=8192)
    program = torch.export.export(Module(), tuple(t.detach() for t in x), dynamic_shapes=({1: n}, {1: n}, {1: n}))
    x, _ = make(333, BF16, MANY)
    assert torch.equal(program.module()(*x), Module()(*x))


@pytest.mark.parametrize(
    "sizes", ((32, 4, 197, 64), (2, 4, 1025, 72), (24, 16, 600, 72)), ids=("heads", "split", "pairs")
)
@pytest.mark.parametrize("options", ({}, RATIO, ANCHORED), ids=str)
def test_only_our_kernels_run(sizes, options):
    """No copy, cast, fill or transposition around them: packed qkv in, packed gradient out."""
    b, h, n, d = sizes
    qkv = torch.randn(b, n, 3, h, d, device="cuda", dtype=BF16).requires_grad_()
    grad = torch.randn(b, n, h, d, device="cuda", dtype=BF16)
    ours = kernel_names()
    torch.autograd.grad(hk.hla2_qkvpacked(qkv, impl="triton", **options), qkv, grad)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(hk.hla2_qkvpacked(qkv, impl="triton", **options), qkv, grad)
        torch.cuda.synchronize()
    found = {event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA}
    assert found and found <= ours, found - ours


def test_graph_capture():
    """A captured forward and backward replays on new inputs."""
    x, grad = make(197, BF16, MANY)
    x = [t.detach().requires_grad_() for t in x]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # kernels are built outside of the capture
        torch.autograd.grad(hk.hla2(*x, impl="triton"), x, grad)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = hk.hla2(*x, impl="triton")
        got = [y, *torch.autograd.grad(y, x, grad)]
    new, _ = make(198, BF16, MANY)
    with torch.no_grad():
        for a, b in zip(x, new, strict=True):
            a.copy_(b[:, :197])
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, results("hla2", x, grad, impl="triton"), strict=True))


def test_autocast():
    """The bits of the call on bfloat16 tensors."""
    x, _ = make(197, FP32, MANY)
    with torch.autocast("cuda", dtype=BF16):
        got = hk.hla2(*x, impl="triton")
    assert got.dtype == BF16 and torch.equal(got, hk.hla2(*[t.bfloat16() for t in x], impl="triton"))


def test_explain_and_refusals():
    x, _ = make(33, BF16, MANY)
    for op in OPS:
        assert hk.explain(op, *x).impl == "triton" and "triton" not in hk.explain(op, *x).why_not
        for options in (RATIO, ELU_CENTRED[0], RATIO_IDENTITY):
            assert hk.explain(op, *x, **options).impl == "triton"
        assert hk.explain(op, *x, impl="torch").impl == "torch"
    assert hk.explain("hla2", torch.stack(x, 2)).impl == "triton"
    refused = (
        ("softmax_attention", x, {}, "torch's own kernels"),
        ("hla2", x, {"causal": True, "ridge": 0.1}, "ridge"),
        ("hla2", x, {**SOFTMAX, "normalize": True}, "a ratio of linear_attention alone"),
        ("hla2", x, {"return_state": True}, "state"),
        ("hla2", [t.double() for t in x], {}, "float64"),
        ("hla2", [t[:, :1] for t in x], {"center": "k", "ridge": 0.1}, "single centred key"),
        ("hla2", [t[..., :8] for t in x], {}, "D = 8 is outside"),
        ("hla2", [t.transpose(1, 3).contiguous().transpose(1, 3) for t in x], {}, "not contiguous"),
    )
    for op, inputs, options, reason in refused:
        explained = hk.explain(op, *inputs, **options)
        assert explained.impl == "torch" and reason in explained.why_not["triton"]
        with pytest.raises(ValueError, match=reason):
            getattr(hk, op)(*inputs, impl="triton", **options)
    assert hk.hla2(*[t[:0] for t in x], impl="triton").shape == (0, 33, 4, 64)
