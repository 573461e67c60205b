"""Triton forms against float64 in Triton's interpreter. Not collected: `test_interpreter` runs its parts, each in a
process of its own; `children` has sequences and what is around a call.

The rule of the error is `tests.helpers.error_rule`; the interpreter computes in float32.
"""

from __future__ import annotations

import pytest
import torch

from hla_kernels.hla.fused import Spec, plan
from tests.ops.fused.cases import (
    FULL,
    HALF,
    OF_MIXTURES,
    check,
    make,
    run,
)

OPS = ("linear_attention", "hla2", "ahla", "hla3", "polynomial")
PLAIN = {}
FIXED = {"fixed": True}
ANCHORED = {"center": "k", "mean_path": True}
RELU_QK = {"center": "qk", "feature_map": "relu", "mean_path": True}
RIDGE = {"ridge": 0.3, "center": "qk", "scale": 0.05}
SCALE = {"scale": 0.2}
RATIO, RELU_EPS = {"feature_map": "elu1", "normalize": True}, {"feature_map": "relu", "normalize": True, "eps": 0.5}
POSITIVE_RATIO = {"normalize": True}  # of tokens that are not negative
ELU = {"feature_map": "elu1"}
ELU_ANCHORED, ELU_MEAN = {**ELU, **ANCHORED}, {**ELU, "mean_path": True}
CASES = [
    ("linear_attention", PLAIN, "heads", 37, 16, 16, (2, 2), FULL, "packed"),
    ("linear_attention", ANCHORED, "split", 37, 40, 40, (2, 2), HALF, "packed"),
    ("linear_attention", RELU_QK, "split", 37, 64, 64, (2, 2), HALF, "strided"),
    ("linear_attention", SCALE, "split", 33, 72, 40, (2, 1), FULL, "contiguous"),
    ("linear_attention", PLAIN, "split", 37, 128, 128, (1, 1), FULL, "strided"),
    ("linear_attention", RATIO, "heads", 37, 64, 64, (2, 2), HALF, "packed"),
    ("linear_attention", RATIO, "split", 37, 40, 40, (2, 2), FULL, "strided"),
    ("hla2", RATIO, "split", 70, 64, 64, (2, 2), HALF, "packed"),
    ("hla2", RATIO, "split", 37, 40, 40, (2, 2), FULL, "contiguous"),
    ("hla2", RATIO, "split", 37, 72, 72, (2, 2), HALF, "packed"),
    ("linear_attention", RATIO, "split", 37, 72, 72, (2, 2), HALF, "packed"),
    ("linear_attention", RATIO, "heads", 37, 72, 72, (2, 2), HALF, "packed"),
    ("linear_attention", {**RATIO, "eps": 0.5}, "split", 70, 128, 128, (1, 1), HALF, "strided"),
    ("hla3", RATIO, "split", 37, 72, 72, (1, 1), HALF, "packed"),
    ("ahla", RATIO, "split", 70, 32, 32, (2, 2), FULL, "packed"),
    ("ahla", RATIO, "split", 70, 64, 64, (2, 2), HALF, "packed"),
    ("ahla", RATIO, "split", 37, 64, 64, (4, 2), HALF, "contiguous"),
    ("ahla", RATIO, "whole", 37, 72, 72, (1, 1), HALF, "packed"),
    # an eps that leaves little of the mean value
    *((op, {**RATIO, "eps": 1e7}, "split", 37, 40, 40, (1, 1), FULL, "packed") for op in OPS[1:4]),
    *((op, {**RELU_EPS, "eps": 1e6}, "split", 37, 40, 40, (1, 1), FULL, "packed") for op in OPS[1:4]),
    ("hla3", RATIO, "whole", 37, 40, 40, (1, 1), HALF, "packed"),
    ("linear_attention", {"feature_map": "elu1"}, "split", 37, 64, 64, (4, 2), HALF, "contiguous"),
    ("hla3", RATIO, "split", 37, 64, 64, (2, 2), HALF, "packed"),
    ("hla3", RATIO, "split", 37, 40, 40, (1, 1), FULL, "packed"),
    *(("polynomial", RATIO, "split", n, d, d, (2, 2), FULL, "packed") for n, d in ((37, 40), (60, 72))),
    ("hla2", PLAIN, "split", 37, 128, 128, (1, 1), HALF, "packed"),
    ("hla2", ANCHORED, "split", 37, 64, 64, (2, 2), HALF, "packed"),
    ("hla2", RELU_QK, "split", 37, 72, 72, (2, 2), FULL, "strided"),
    ("hla2", RIDGE, "split", 33, 40, 40, (2, 2), FULL, "packed"),
    ("hla2", SCALE, "split", 33, 16, 48, (4, 2), FULL, "contiguous"),
    ("hla2", PLAIN, "split", 37, 72, 72, (1, 1), HALF, "packed"),
    ("hla2", ANCHORED, "whole", 37, 72, 72, (1, 1), HALF, "packed"),
    ("ahla", PLAIN, "split", 37, 64, 64, (2, 2), HALF, "packed"),
    ("ahla", ANCHORED, "split", 37, 72, 72, (2, 2), HALF, "packed"),
    ("ahla", RELU_QK, "split", 37, 40, 16, (4, 2), FULL, "contiguous"),
    ("ahla", RIDGE, "split", 33, 16, 16, (2, 2), FULL, "strided"),
    ("hla3", PLAIN, "whole", 37, 72, 72, (1, 1), HALF, "packed"),
    ("hla3", ANCHORED, "split", 37, 40, 40, (1, 1), FULL, "packed"),
    ("hla3", RELU_QK, "split", 37, 64, 64, (2, 2), HALF, "strided"),
    ("hla3", RIDGE, "split", 33, 16, 16, (2, 1), FULL, "contiguous"),
    ("linear_attention", PLAIN, "split", 37, 128, 16, (2, 2), HALF, "ones"),
    ("ahla", PLAIN, "split", 37, 128, 16, (1, 1), HALF, "ones"),
    ("polynomial", RELU_QK, "split", 37, 40, 40, (1, 1), FULL, "strided"),
    ("polynomial", {"feature_map": "identity", **POSITIVE_RATIO}, "split", 70, 64, 64, (2, 2), HALF, "positive"),
    # values wider than keys, whose second parts differ too
    ("ahla", RATIO, "split", 37, 72, 96, (2, 2), HALF, "contiguous"),
    ("hla2", {**ELU_MEAN, "ridge": 0.1}, "split", 37, 40, 96, (2, 2), HALF, "contiguous"),
    ("hla3", {"feature_map": "relu", "mean_path": True}, "split", 2, 40, 96, (1, 1), HALF, "contiguous"),
    ("hla2", {"feature_map": "relu", "mean_path": True}, "split", 37, 40, 48, (1, 1), HALF, "contiguous"),
    ("hla3", RATIO, "split", 37, 72, 64, (2, 1), HALF, "contiguous"),
    # float16 factors; in use for bfloat16 tokens
    ("hla2", PLAIN, "halves", 37, 72, 72, (2, 2), HALF, "packed"),
    ("ahla", SCALE, "halves", 70, 72, 72, (1, 1), HALF, "packed"),
    ("ahla", PLAIN, "halves", 70, 64, 64, (2, 2), HALF, "contiguous"),
    ("hla3", SCALE, "halves", 37, 72, 72, (1, 1), HALF, "packed"),
    *((op, PLAIN, "halves", 514, 64, 64, (1, 1), HALF, "packed") for op in OPS[1:4]),
    ("hla3", PLAIN, "halves", 37, 64, 64, (1, 1), HALF, "packed"),
    ("hla2", PLAIN, "halves", 80, 64, 64, (1, 1), HALF, "packed"),
    ("ahla", RATIO, "halves", 70, 64, 64, (2, 2), HALF, "packed"),
    *(("hla2", RATIO, "halves", n, 72, 72, (1, 1), HALF, "packed") for n in (37, 514)),
    *((x, RATIO, "halves", 37, d, d, (1, 1), HALF, "contiguous") for x, d in (("hla2", 64), ("ahla", 72))),
    *((op, RATIO, "halves", n, 64, 64, (1, 1), HALF, "packed") for op in OPS[1:4] for n in (37, 600)),
    *(("hla3", RELU_EPS, "halves", 37, d, d, (2, 2), HALF, "strided") for d in (64, 72)),
    *((op, POSITIVE_RATIO, "halves", 37, d, d, (1, 1), HALF, "positive") for op in OPS[1:4] for d in (64, 72)),
    *(("polynomial", {**x, **POSITIVE_RATIO}, "split", 37, 72, 72, (1, 1), HALF, "positive") for x in (FIXED, {})),
    ("linear_attention", ANCHORED, "halves", 37, 72, 72, (1, 1), HALF, "packed"),
    ("hla2", {"center": "k"}, "halves", 37, 64, 64, (2, 2), HALF, "packed"),
    ("hla3", ANCHORED, "halves", 70, 64, 64, (2, 2), HALF, "packed"),
    *((op, ANCHORED, "halves", 70, 72, 72, (1, 1), HALF, "packed") for op in OPS[1:4]),
    ("ahla", {"center": "k"}, "halves", 37, 72, 72, (1, 1), HALF, "contiguous"),
    ("ahla", ANCHORED, "halves", 37, 64, 64, (1, 1), HALF, "packed"),
    ("hla3", ANCHORED, "halves", 514, 64, 64, (1, 1), HALF, "packed"),
    *OF_MIXTURES,
    # features of elu1 that nothing divides
    ("hla2", ELU_ANCHORED, "split", 70, 40, 40, (2, 1), FULL, "contiguous"),
    ("hla3", ELU_MEAN, "split", 37, 72, 72, (1, 1), FULL, "packed"),
    ("polynomial", PLAIN, "split", 37, 40, 40, (1, 1), HALF, "packed"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x) for x in (c[0], *c[1].values(), c[2], c[4])))
def test_matches_float64(monkeypatch, case):
    op, options, path, n, d, dv, heads, dtype, layout = case
    spec = Spec(op, **options)
    tokens, grad, c = make(spec, n, d, dv, heads, dtype, layout)
    if path.startswith("halves") and spec.normalize:  # made for bfloat16, whose numbers are as small as they come
        grad = 64 * grad
    inputs = (tokens, grad, c)
    got = run(monkeypatch, spec, *inputs, path, save=layout != "contiguous", packed=layout == "packed")
    check(spec, *inputs, got)


# op, options, path, which of q, k, v: what cancels in dq, dk or dv must have been rounded alike
MEANS = (
    *((op, RATIO, path, 2) for op in ("hla2", "ahla", "hla3") for path in ("halves", "split")),
    ("polynomial", RATIO, "split", 2), ("polynomial", {**FIXED, **RATIO}, "split", 2),
    *(("hla2", ANCHORED, "halves", i) for i in range(3)), ("ahla", ANCHORED, "split", 1),
)  # fmt: skip


@pytest.mark.parametrize(("op", "options", "path", "which"), MEANS, ids=str)
def test_channels_with_a_mean(monkeypatch, op, options, path, which):
    """Twice their deviation. The gradient is large, and coefficients positive, for forms made for bfloat16, whose
    numbers are as small as they come."""
    d = 32 if op == "polynomial" else 64
    spec = Spec(op, **options)
    tokens, grad, c = make(spec, 70, d, d, (1, 1), HALF)
    tokens[which].add_(2)
    grad, c = 64 * grad, None if c is None else c.abs()
    check(spec, tokens, grad, c, run(monkeypatch, spec, tokens, grad, c, path, True, True))


@pytest.mark.parametrize("op", ("linear_attention", "ahla", "hla3"))
@pytest.mark.parametrize("options", ({"scale": 5.0}, {"q_scale": 1e-4, "eps": 0.0}), ids=str)
def test_ratio_of_any_scale(monkeypatch, op, options):
    """float16 has 5 digits before and 4 behind the point: the scale of moments cancels, and must not leave them."""
    spec = Spec(op, **{**RATIO, **options})
    inputs = make(spec, 37, 16, 16, (2, 2), HALF)
    path = "heads" if op == "linear_attention" else "split"
    check(spec, *inputs, run(monkeypatch, spec, *inputs, path, True, True))


@pytest.mark.parametrize("layout", ("expanded", "turned"))
def test_coefficients_of_any_strides(layout):
    spec = Spec("polynomial")
    tokens, grad, c = make(spec, 20, 16, 16, (2, 2), FULL)
    c = c[:1].expand(2, 4) if layout == "expanded" else c.T.contiguous().T
    x = [*(t.detach().requires_grad_() for t in tokens), c.detach().requires_grad_()]
    options = ("polynomial", None, False, None, False, 0.0, None, 1e-6, 1.0, "triton", False, True)
    y = torch.ops.hla_kernels.two_sided(*x, *options)[0]
    check(spec, tokens, grad, c, [y, *torch.autograd.grad(y, x, grad)])


def test_several_parts_of_a_head(monkeypatch):
    monkeypatch.setattr(plan, "reduce_parts", lambda heads, n, bn: (-(-n // 64), 64))
    spec = Spec("hla2", center="k", mean_path=True)
    inputs = make(spec, 130, 32, 32, (1, 1), FULL)
    first, second = (run(monkeypatch, spec, *inputs, "split", True, True) for _ in range(2))
    check(spec, *inputs, first)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("n", (1, 2))
@pytest.mark.parametrize(("op", "path"), (("linear_attention", "heads"), ("hla3", "split")))
def test_one_and_two_tokens(monkeypatch, n, op, path):
    spec = Spec(op)
    inputs = make(spec, n, 32, 32, (2, 2), FULL)
    check(spec, *inputs, run(monkeypatch, spec, *inputs, path, True, True))
