"""Torch forms against the literal N x N definitions, and against the serial recurrence."""

import pytest
import torch

import hla_kernels as hk
from tests.ops.cases import (
    BOTH_MODES,
    assert_same,
    extra,
    l2_error,
    literal,
    table,
    tokens,
)


@pytest.mark.parametrize(("op", "options"), table(causal=False) + table(causal=True, product=True))
def test_definition(op, options):
    for n in (1, 17, 63, 64, 65, 197):
        q, k, v = tokens(n)
        y = getattr(hk, op)(q, k, v, *extra(op), **options)
        assert y.is_contiguous()
        assert_same(y, literal(op, q, k, v, *extra(op), **options))


@pytest.mark.parametrize(("op", "options"), table(causal=True))
def test_recurrence(op, options):
    q, k, v = tokens(67, b=1)
    y = getattr(hk, op)(q, k, v, **options)
    assert_same(y, literal(op, q, k, v, form="recurrent", **options))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (3, 3)], ids=str)
@pytest.mark.parametrize(("op", "causal"), BOTH_MODES)
def test_grouped_heads(op, causal, heads):
    h, n_key = heads
    q, k, v = tokens(40, h=h, hk=n_key)
    options = {"causal": causal, "feature_map": "elu1", "normalize": True}
    grouped = getattr(hk, op)(q, k, v, *extra(op, h), **options)
    k, v = (x.repeat_interleave(h // n_key, dim=2) for x in (k, v))
    assert_same(grouped, getattr(hk, op)(q, k, v, *extra(op, h), **options))


PRECISION = [
    ("plain", {}),
    ("ratio", {"feature_map": "elu1", "normalize": True}),
    ("anchored", {"center": "k", "mean_path": True}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "options"), PRECISION, ids=[name for name, _ in PRECISION])
@pytest.mark.parametrize(("op", "causal"), BOTH_MODES)
def test_rounding(op, causal, name, options, dtype):
    """At most twice the error of the definition evaluated in the same dtype, forward and backward, worst of three
    seeds."""
    options = {**options, "causal": causal, "scale": 1 / 197 if causal else None}
    ours, plain = [0.0] * 4, [0.0] * 4
    for seed in range(3):
        inputs = tokens(197, d=16, dv=16, dtype=dtype, seed=seed)
        # the same (already rounded) inputs in every precision
        truth = run(literal, op, [x.double() for x in inputs], options)
        for errors, form, xs in ((ours, form_of(op), inputs), (plain, literal, inputs)):
            for i, (x, t) in enumerate(zip(run(form, op, xs, options), truth, strict=True)):
                errors[i] = max(errors[i], l2_error(x, t))
    for i, (a, b) in enumerate(zip(ours, plain, strict=True)):
        assert a <= 2 * b, (("o", "dq", "dk", "dv")[i], a, b)


def form_of(op):
    return lambda _, *args, **options: getattr(hk, op)(*args, **options)


def run(form, op, inputs, options):
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = form(op, *inputs, *extra(op, dtype=inputs[0].dtype), **options)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
    return [y, *torch.autograd.grad(y, inputs, weights)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_softmax(causal, grouped):
    q, k, v = tokens(65, hk=2 if grouped else 4)
    for scale in (None, 0.7):
        y = hk.softmax_attention(q, k, v, causal=causal, scale=scale)
        assert y.is_contiguous()
        assert_same(y, hk.softmax_attention(q, k, v, causal=causal, scale=scale, impl="reference"))


@pytest.mark.parametrize(("op", "causal"), BOTH_MODES)
def test_fp16_long_is_finite(op, causal):
    """fp16, N = 32768, unit normal: every two-sided operator at default scale, every causal one with the ratio
    normaliser."""
    q, k, v = tokens(32768, b=1, h=1, hk=1, d=32, dv=32, dtype=torch.float16)
    options = {"causal": True, "feature_map": "elu1", "normalize": True} if causal else {}
    y = getattr(hk, op)(q, k, v, *extra(op, 1), **options)
    assert y.dtype == torch.float16 and bool(torch.isfinite(y).all())
