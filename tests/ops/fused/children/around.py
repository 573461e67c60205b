"""What is around a call of the Triton forms, in Triton's interpreter: operators of torch, batches, the kernels of
norms. Not collected: `test_interpreter` runs it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import hla_kernels as hk
from hla_kernels import op
from hla_kernels.dispatch import trial, verify
from hla_kernels.dispatch.recording import LOCAL
from hla_kernels.features import feature, feature_grad, mapped, rms_norm
from hla_kernels.features.rms_norm import prepared
from hla_kernels.hla import fused
from hla_kernels.hla.fused import Spec, plan
from hla_kernels.hla.fused.plan import paths
from tests.helpers import rms_norms as norms
from tests.helpers.error_rule import check_tokens, less, relative_error
from tests.ops.fused.cases import FULL, HALF, check, make, poison


@pytest.mark.parametrize("save", (False, True))
def test_through_the_custom_operators(monkeypatch, save):
    """q, k, v and packed give the same bits, with gradients, from an expanded gradient; no rows."""
    ops = torch.ops.hla_kernels
    rest = ("ahla", None, False, "k", True, 0.0, None, 1e-6, 1.0, "triton", False, save)
    spec = Spec("ahla", center="k", mean_path=True)
    qkv = torch.randn(2, 33, 3, 2, 16, requires_grad=True)
    tokens = [x.detach().requires_grad_() for x in qkv.unbind(2)]
    with monkeypatch.context() as patch:
        poison(patch)
        y, z = ops.two_sided(*tokens, None, *rest)[0], ops.two_sided_qkvpacked(qkv, None, *rest)[0]
        y.sum().backward()
        z.sum().backward()
    assert torch.equal(y, z) and torch.equal(torch.stack([x.grad for x in tokens], 2), qkv.grad)
    got = [y, *(x.grad for x in tokens)]
    check(spec, tokens, torch.ones_like(y), None, got)
    assert ops.two_sided(*[x[:0] for x in tokens], None, *rest)[0].shape == (0, 33, 2, 16)


@pytest.mark.parametrize(("name", "center"), (("relu", "qk"), ("elu1", None), ("elu1", "k"), ("elu1", "qk")))
@pytest.mark.parametrize("layout", ("packed", "strided", "contiguous"))
def test_features_and_their_gradients(monkeypatch, name, center, layout):
    """To the rounding of float16, of several heads and rows; NaN stays NaN, and padding that is NaN gets zeros. elu1 of
    what is centred is 1 less."""
    tokens, _, _ = make(Spec("hla2"), 67, 40, 40, (4, 2) if layout == "contiguous" else (4, 4), HALF, layout)
    q, k, _ = tokens
    q[0, 0, 0, 0], q[0, 1, 0, :3] = float("nan"), torch.tensor([0.0, -80.0, -1e-4])
    grads = [torch.randn(x.shape).to(HALF) for x in (q, k)]
    grads[0][0, 0, 0, 0] = 0
    with monkeypatch.context() as patch:
        poison(patch)
        rest, found = mapped.features(name, q, k, torch.empty(0), center)
    assert rest.numel() == 0
    for x, y, which in zip((q, k), found, "qk", strict=True):
        wanted = feature(x.double(), name) - less(name, which, center)
        torch.testing.assert_close(y, wanted.to(HALF), rtol=2**-10, atol=2**-23, equal_nan=True)
    doubles = [(x.double(), g.double()) for x, g in zip((q, k), grads, strict=True)]
    expected = [feature_grad(x, feature(x, name), g, name) for x, g in doubles]
    expected[0][0, 0, 0, 0] = 0
    mapped.gradients(name, q, k, (grads[0], grads[1]), (grads[0], grads[1]))
    for g, w in zip(grads, expected, strict=True):
        torch.testing.assert_close(g, w.to(HALF), rtol=2**-10, atol=2**-23)


@pytest.mark.parametrize(("name", "kind"), [("softmax", "packed"), ("softmax_pair", "mask"), ("softmax_pair", None)])
def test_features_that_are_softmaxes(monkeypatch, name, kind):
    """They are tokens of the kernels; padding holds NaN, and gets zeros."""
    monkeypatch.setattr(op, "why_not_triton", lambda call: None)
    monkeypatch.setattr(op, "is_shipped", lambda *_: True)
    x = [torch.randn(2, 35, h, d).to(FULL) for h, d in ((4, 24), (2, 24), (2, 16))]
    grad, mask, options = torch.randn(2, 35, 4, 16), torch.rand(2, 35) < 0.7, {"feature_map": name, "normalize": True}
    if kind == "mask":
        options["key_padding_mask"] = mask
    if kind == "packed":
        x, grad = [t[:1] for t in x], grad[:1]
        options |= {"cu_seqlens": torch.tensor([0, 3, 35], dtype=torch.int32), "max_seqlen": 32}
    results = []
    for impl, dtype in (("triton", FULL), ("torch", torch.float64)):
        leaves = [t.to(dtype) for t in x]
        if kind == "mask":
            leaves = [t.masked_fill(~mask[:, :, None, None], float("nan")) for t in leaves]
        leaves = [t.requires_grad_() for t in leaves]
        y = hk.linear_attention(*leaves, impl=impl, **options)
        results.append([y, *torch.autograd.grad(y, leaves, grad.to(dtype))])
    check_tokens(*results)
    assert kind != "mask" or not any(bool(t[~mask].any()) for t in results[0])


def test_packed_tensors_with_features_that_are_softmaxes(monkeypatch):
    monkeypatch.setattr(op, "why_not_triton", lambda call: None)
    monkeypatch.setattr(op, "is_shipped", lambda *_: True)
    qkv, options = torch.randn(1, 20, 3, 2, 16), {"feature_map": "softmax_pair", "normalize": True, "impl": "triton"}
    separate = hk.linear_attention(*qkv.unbind(2), **options)
    assert torch.equal(hk.linear_attention_qkvpacked(qkv, **options), separate)


def test_opcheck_with_saved_state():
    rest = ("hla2", "elu1", True, None, False, 0.0, None, 1e-6, 1.0, "triton", False, True)
    x = [torch.randn(1, 5, 1, 16, requires_grad=True) for _ in range(3)]
    torch.library.opcheck(torch.ops.hla_kernels.two_sided, (*x, None, *rest))
    qkv = torch.randn(1, 5, 3, 1, 16, requires_grad=True)
    torch.library.opcheck(torch.ops.hla_kernels.two_sided_qkvpacked, (qkv, None, *rest))


@pytest.mark.parametrize("n", (paths.SHORT, paths.SHORT + 1))
@pytest.mark.parametrize("d", (64, 72))
@pytest.mark.parametrize("options", ({}, {"normalize": True}), ids=str)
@pytest.mark.parametrize("save", (False, True))
def test_one_launch_of_few_tokens(monkeypatch, save, options, d, n):
    """A forward of few heads, but with 72 channels not before a backward, which runs other kernels."""
    spec, launched = Spec("linear_attention", **options), []
    tokens, grad, _ = make(spec, n, d, d, (1, 1), HALF, "positive")
    outs = tuple(torch.empty_like(x) for x in tokens)
    counter = SimpleNamespace(launched=lambda kernel, *_: launched.append(kernel))
    with monkeypatch.context() as patch:
        patch.setattr(LOCAL, "recorder", counter, raising=False)
        poison(patch)
        o, saved = fused.forward(*tokens, None, spec, save=save)
        assert (len(launched) == 1) == (n == paths.SHORT and (d == 64 or not save))
        fused.backward(grad, *tokens, None, spec, outs, saved)
    check(spec, tokens, grad, None, [o, *outs])


@pytest.mark.parametrize("on", (True, False))
def test_a_sample_does_not_see_the_batch(monkeypatch, on):
    """With a plan that depends on B * H: the same bits alone and in a batch if and only if it was asked for."""
    monkeypatch.setattr(plan, "reduce_parts", lambda heads, n, bn: (2, 64) if heads % 2 == 0 else (4, 32))
    spec = Spec("ahla", center="k", mean_path=True)
    tokens, grad, _ = make(spec, 100, 16, 16, (1, 1), FULL, "contiguous")
    results = []
    plan.set_batch_invariant(on)
    try:
        for rows in (slice(0, 2), slice(1, 2)):
            x = [t[rows] for t in tokens]
            outs = tuple(torch.empty_like(t) for t in x)
            o, saved = fused.forward(*x, None, spec, save=True)
            fused.backward(grad[rows], *x, None, spec, outs, saved)
            results.append(torch.stack([t[-1] for t in (o, *outs)]))
    finally:
        plan.set_batch_invariant(False)
    assert torch.equal(*results) == on


def test_batch_invariance_is_true_or_false():
    with pytest.raises(ValueError, match="takes True or False, got 1"):
        plan.set_batch_invariant(1)


@pytest.mark.parametrize("channels", [48, 100])
def test_rms_norm(monkeypatch, channels):
    """float16 tokens that are rows of a wider tensor, float32 weights."""
    x, weight, grad = norms.inputs(HALF, channels)
    exact = norms.results(norms.by_hand, *(t.double() for t in (x, weight, grad)))
    with monkeypatch.context() as patch:
        poison(patch)
        got = norms.results(lambda *t: torch.ops.hla_kernels.rms_norm(*t, 1e-6)[0], x, weight, grad)
    assert [t.dtype for t in got] == [HALF, HALF, FULL]
    assert all(relative_error(a, b) <= 4e-4 for a, b in zip(got, exact, strict=True))  # measured 2.1e-4


@pytest.mark.parametrize("sizes", [(48, False, 0), (48, False, 8), (40, True, 20)])
def test_the_check_of_norms_passes(monkeypatch, sizes):
    monkeypatch.setattr(trial, "DEVICE", "cpu")
    monkeypatch.setattr(rms_norm, "PROGRAMS", 6)
    (run,) = trial.runs(("rms_norm", (HALF, FULL), sizes))
    assert verify.failure(run) is None


@pytest.mark.parametrize(("channels", "width", "relu"), [(48, 16, True), (120, 40, False)])
def test_prepared_queries(monkeypatch, channels, width, relu):
    """The same, then the positive part and the rotation."""
    x, weight, grad = norms.inputs(HALF, channels)
    turns = norms.tables(x, width)
    both = [t.double() for t in turns]
    exact = norms.results(
        lambda x, w: norms.prepared_by_hand(x, w, relu, *both), *(t.double() for t in (x, weight, grad))
    )
    with monkeypatch.context() as patch:
        poison(patch)
        got = norms.results(lambda *t: prepared(*t, 1e-6, relu, *turns), x, weight, grad)
    assert all(relative_error(a, b) <= 4e-4 for a, b in zip(got, exact, strict=True))
