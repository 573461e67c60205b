"""Padded and packed sequences in the Triton forms on a CUDA device: error, bits, padding, graphs, other batches."""

from __future__ import annotations

import pytest
import torch

import hla_kernels as hk
from tests.helpers.error_rule import check_tokens, features_as_read
from tests.ops.fused.cases import twice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton forms need a CUDA device: none here"),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ANCHORED = {"center": "k", "mean_path": True}
RELU_QK = {"center": "qk", "feature_map": "relu", "mean_path": True, "q_scale": 0.3}
RATIO = {"feature_map": "elu1", "normalize": True, "eps": 1e-9}
OPS = ("linear_attention", "hla2", "ahla", "hla3", "polynomial")
# (B, H, Hk, D, Dv): 128 heads of D = 64 take the one-program forms, the others are split
MANY, ODD = (32, 4, 4, 64, 64), (3, 4, 2, 72, 72)
CASES = [
    *((op, ANCHORED, BF16, MANY) for op in OPS),
    *((op, RELU_QK, FP16, ODD) for op in OPS[:4]),
    ("polynomial", RELU_QK, FP16, (3, 4, 2, 64, 64)),
    *((op, RATIO, BF16, MANY) for op in OPS),
    *((op, RATIO, BF16, ODD) for op in OPS[:4]),
    ("ahla", {"ridge": 0.3, "center": "qk"}, FP32, (3, 2, 2, 40, 40)),
    ("hla3", ANCHORED, FP32, (3, 4, 2, 96, 88)),
    ("linear_attention", {"feature_map": "softmax_pair", "normalize": True}, BF16, (3, 4, 2, 40, 64)),
]


def make(n, dtype, sizes, kind):
    """Tokens, the output's gradient, and the sequences: a random mask, or as many packed ones, empty ones too."""
    b, h, heads_k, d, dv = sizes
    g = torch.Generator("cuda").manual_seed(n)
    lengths = torch.randint(0, n + 1, (b,), generator=g, device="cuda")
    lengths[0] = n
    rows = (b, n) if kind == "mask" else (1, int(lengths.sum()))
    tokens = [
        torch.randn(*rows, *s, generator=g, device="cuda").to(dtype) for s in ((h, d), (heads_k, d), (heads_k, dv))
    ]
    grad = torch.randn(*rows, h, dv, generator=g, device="cuda").to(dtype)
    if kind == "mask":
        order = torch.rand(b, n, generator=g, device="cuda").argsort(1)
        return tokens, grad, {"key_padding_mask": order < lengths[:, None]}
    cu = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    return tokens, grad, {"cu_seqlens": cu, "max_seqlen": n}


def results(op, x, grad, dtype=None, **options):
    """o, dq, dk, dv; dtype: of features as they are read."""
    x = [t.detach().requires_grad_() for t in x]
    q, k, options = (*x[:2], options) if dtype is None else features_as_read(*x[:2], options, dtype)
    more = ()
    if op == "polynomial":
        more = (torch.rand(x[0].shape[2], 4, generator=torch.Generator().manual_seed(0)).cuda().to(x[0].dtype),)
    y = getattr(hk, op)(q, k, x[2], *more, **options)
    return [y.detach(), *torch.autograd.grad(y, x, grad.to(y.dtype))]


@pytest.mark.parametrize("kind", ("mask", "packed"))
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{'-'.join(c[1])}-{str(c[2])[6:]}-{c[3][3]}")
def test_error_and_bits(case, kind):
    op, options, dtype, sizes = case
    x, grad, ragged = make(197, dtype, sizes, kind)
    options = {**options, **ragged}
    truth = results(op, [t.double() for t in x], grad.double(), dtype, impl="torch", **options)
    if kind == "mask":
        for t in (*x, grad):
            t[~ragged["key_padding_mask"]] = float("nan")
    first, second = twice(results, op, x, grad, impl="triton", **options)
    check_tokens(first, truth, feature_map=options.get("feature_map"))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        assert kind == "packed" or not bool(a[~ragged["key_padding_mask"]].any())


@pytest.mark.parametrize("options", ({"feature_map": "elu1", "mean_path": True}, ANCHORED, {"center": "k"}), ids=str)
@pytest.mark.parametrize("op", OPS)
def test_of_a_token_that_is_its_own_mean_nothing_is_left(op, options):
    """Alone, and between others: products of its features cancel, and not up to their rounding."""
    mean = float("mean_path" in options)
    others = (BF16, (64, 16, 16, 72, 72)), (FP16, ODD), (FP32, ODD)
    for dtype, sizes in ((BF16, MANY), *(((FP16, (3, 4, 2, 64, 64)),) if op == "polynomial" else others)):
        x, grad, _ = make(1, dtype, sizes, "mask")
        got = results(op, x, grad, impl="triton", **options)
        expected = mean * x[2].repeat_interleave(grad.shape[2] // x[2].shape[2], 2), mean * grad
        sums = expected[1].float().unflatten(2, (x[2].shape[2], -1)).sum(3).to(dtype)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[3], sums)
        assert not bool(got[1].any()) and not bool(got[2].any())
        x, grad, _ = make(40, dtype, (1, *sizes[1:]), "mask")
        cu = torch.tensor([0, 1, 20, 21, 39, 40], device="cuda", dtype=torch.int32)
        rows = [0, 20, 39]
        whole = results(op, x, grad, impl="triton", cu_seqlens=cu, max_seqlen=19, **options)
        alone = [t[:, rows].transpose(0, 1).contiguous() for t in (*x, grad)]
        got = results(op, alone[:3], alone[3], impl="triton", **options)
        assert all(torch.equal(a[:, rows], b.transpose(0, 1)) for a, b in zip(whole, got, strict=True))


def test_packed_qkv_of_packed_sequences():
    cu = torch.tensor([0, 100, 197], device="cuda", dtype=torch.int32)
    qkv = torch.randn(1, 197, 3, 2, 64, device="cuda", dtype=BF16, requires_grad=True)
    grad = torch.randn(1, 197, 2, 64, device="cuda", dtype=BF16)
    ragged = {"cu_seqlens": cu, "max_seqlen": 100, "impl": "triton"}
    hk.hla2_qkvpacked(qkv, **ANCHORED, **ragged).backward(grad)
    separate = results("hla2", qkv.detach().unbind(2), grad, **ANCHORED, **ragged)
    assert torch.equal(qkv.grad, torch.stack(separate[1:], 2))


@pytest.mark.parametrize("kind", ("mask", "packed"))
def test_graph_capture(kind):
    """Lengths may change between replays."""
    x, grad, ragged = make(197, BF16, MANY, "mask")
    name = "key_padding_mask"
    other = ragged[name].roll(1, 0)
    if kind == "packed":
        x, grad, name = [t[:1] for t in x], grad[:1], "cu_seqlens"
        ragged = {name: torch.tensor([0, 50, 197], device="cuda", dtype=torch.int32), "max_seqlen": 197}
        other = torch.tensor([0, 100, 197], device="cuda", dtype=torch.int32)
    x = [t.requires_grad_() for t in x]
    f = lambda: [y := hk.ahla(*x, impl="triton", **ANCHORED, **ragged), *torch.autograd.grad(y, x, grad)]  # noqa: E731
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = f()
    ragged[name].copy_(other)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, f(), strict=True))


@pytest.mark.parametrize(
    ("n", "d", "options"),
    ((197, 64, {}), (197, 64, RATIO), (1100, 64, ANCHORED), (300, 72, RATIO), (600, 72, {}), (2100, 128, {})),
    ids=str,
)
def test_batch_invariance(n, d, options):
    """The same bits alone, in a small batch and in one that fills the chip, where it was asked for."""
    x, grad, _ = make(n, BF16, (24, 16, 16, d, d), "mask")
    hk.set_batch_invariant(True)
    try:
        for op in OPS:
            whole = results(op, x, grad, impl="triton", **options)
            for rows in (slice(0, 1), slice(7, 10)):
                part = results(op, [t[rows] for t in x], grad[rows], impl="triton", **options)
                assert all(torch.equal(a[rows], b) for a, b in zip(whole, part, strict=True)), op
    finally:
        hk.set_batch_invariant(False)
