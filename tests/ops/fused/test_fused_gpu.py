"""The Triton forms through the public operators on a CUDA device, against the torch form in float64 (the rule of the
error: `tests.helpers.error_rule`). Every buffer of the Triton form starts as NaN, and runs repeat bit by bit."""

from __future__ import annotations

import itertools

import pytest
import torch

import hla_kernels as hk
from hla_kernels.op import prepare
from tests.helpers.error_rule import NAMES, check_coefficients, check_tokens, sizes_of_coefficients
from tests.helpers.fused_gpu import (
    ANCHORED,
    BF16,
    ELU,
    ELU_CENTRED,
    FP16,
    FP32,
    GROUPED,
    MANY,
    ODD,
    OPS,
    RATIO,
    RATIO_IDENTITY,
    WIDE,
    make,
    results,
    truth,
)
from tests.ops.fused.cases import of_polynomial, twice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton forms need a CUDA device: none here"),
]

RELU_QK = {"center": "qk", "feature_map": "relu", "mean_path": True}
RIDGE = {"ridge": 0.3, "center": "qk", "scale": 0.003}
RATIO_RELU = {"feature_map": "relu", "normalize": True}
RATIO_SOFTMAX, RATIO_PAIR = ({"feature_map": name, "normalize": True} for name in ("softmax", "softmax_pair"))
UNEVEN = (36, 4, 4, 64, 64)  # heads that leave multiprocessors without work in their last round
MANY_ODD = (16, 12, 12, 72, 72)  # the D x D algebra of a head in one program
PAIRS = (24, 16, 16, 72, 72)  # two neighbouring heads a program
HALF, FEW = (32, 4, 4, 32, 32), (4, 4, 4, 64, 64)
WIDE_VALUES, RELU_MEAN = ((8, 4, 4, 40, 96), (2, 4, 4, 40, 48)), {"feature_map": "relu", "mean_path": True}
CASES = [
    *((op, {}, BF16, MANY) for op in OPS),
    *((op, {}, BF16, sizes) for op in OPS for sizes in (MANY_ODD, PAIRS)),
    *((op, options, BF16, UNEVEN) for op in OPS[1:] for options in ({}, ANCHORED)),
    *((op, RELU_QK, BF16, MANY) for op in OPS),
    *((op, ANCHORED, FP16, ODD) for op in OPS),
    *((op, ANCHORED, BF16, sizes) for op in OPS for sizes in (MANY, MANY_ODD)),
    *((op, {"center": "k"}, BF16, sizes) for op, sizes in (("hla2", MANY), ("ahla", MANY_ODD), ("hla3", MANY_ODD))),
    *((op, ANCHORED, FP32, (2, 2, 2, 40, 40)) for op in ("linear_attention", "ahla")),
    *((op, RIDGE, BF16, WIDE) for op in OPS[1:]),
    *((op, {"scale": 0.01}, BF16, GROUPED) for op in OPS),
    ("ahla", RIDGE, FP32, MANY),
    ("linear_attention", {}, FP32, WIDE),
    *((op, RATIO, BF16, sizes) for op in OPS for sizes in (MANY, ODD)),
    *((op, RATIO, BF16, sizes) for op in OPS for sizes in (WIDE, MANY_ODD, PAIRS)),
    ("linear_attention", {**RATIO_RELU, "eps": 0.5}, BF16, PAIRS),
    ("ahla", {**RATIO, "eps": 0.5}, BF16, MANY),
    ("hla2", {}, FP16, WIDE),
    *((op, RATIO, BF16, GROUPED) for op in OPS),
    *((op, options, BF16, MANY) for op in OPS for options in (RATIO_RELU, ELU)),
    *((op, RATIO_IDENTITY, BF16, sizes) for op in OPS for sizes in (MANY, MANY_ODD, PAIRS, ODD, WIDE, FEW)),
    *((op, {"feature_map": "relu", "mean_path": True}, BF16, MANY) for op in OPS),
    *((op, options, BF16, sizes) for op in OPS for options in ELU_CENTRED for sizes in (MANY, ODD)),
    *((op, ELU_CENTRED[0], FP16, sizes) for op in OPS for sizes in (MANY, ODD)),
    *((op, ELU_CENTRED[0], BF16, WIDE) for op in OPS),
    *((op, {}, FP32, FEW) for op in ("hla2", "hla3")),
    *((op, options, FP32, sizes) for op in OPS for options, sizes in ((RATIO, FEW), (RATIO, ODD), (ELU, FEW))),
    *(("linear_attention", options, BF16, sizes) for options in (RATIO_PAIR, RATIO_SOFTMAX) for sizes in (HALF, FEW)),
    ("linear_attention", RATIO_SOFTMAX, BF16, ODD),
    # values wider than keys, or no wider than the padding of keys
    *((op, RATIO, BF16, sizes) for op in OPS for sizes in ((3, 4, 4, 40, 96), (2, 4, 4, 72, 96), (2, 4, 4, 72, 64))),
    *((op, RELU_MEAN, dtype, sizes) for op in OPS for dtype in (BF16, FP16) for sizes in WIDE_VALUES),
]


def check(op, x, grad, where, *more, impl="triton", **options):
    """The rule of the error, and the same bits in a second run."""
    exact = truth(op, x, grad, *more, **options)
    first, second = twice(results, op, x, grad, *more, impl=impl, **options)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), where
    assert [(a.shape, a.dtype) for a in first] == [(t.shape, x[0].dtype) for t in exact]
    check_tokens(first, exact, where, options.get("feature_map"))


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{'-'.join(c[1])}-{str(c[2])[6:]}-{c[3][3]}")
def test_error_and_bits(case):
    op, options, dtype, sizes = case
    for n in (17, 333, 1025) + (4097,) * (sizes != PAIRS):
        x, grad = make(n, dtype, sizes)
        if options is RATIO_IDENTITY:
            x = [x[0].abs(), x[1].abs(), x[2]]
        check(op, x, grad, n, **options)


@pytest.mark.parametrize("options", ({}, RATIO, ANCHORED), ids=("plain", "ratio", "centred"))
@pytest.mark.parametrize("op", OPS)
def test_many_long_heads(op, options):
    """A ViT of 1024 pixels: the rule of the error in the first sample and the last."""
    x, grad = make(4097, BF16, (64, 6, 6, 64, 64))
    first, second = twice(results, op, x, grad, impl="triton", **options)
    assert all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(first, second, strict=True))
    some = [0, 63]
    exact = truth(op, [t[some] for t in x], grad[some], **options)
    check_tokens([a[some] for a in first], exact)


@pytest.mark.parametrize("op", OPS)
def test_ratio_of_many_tokens(op):
    """Independent q and k read nearly the same of many tokens, whose part of dq cancels."""
    check(op, *make(32760, BF16, (1, 2, 2, 64, 64)), "", **RATIO)


@pytest.mark.parametrize("sizes", (MANY, MANY_ODD, FEW, PAIRS), ids=("heads", "split_72", "split_64", "pairs"))
@pytest.mark.parametrize("op", OPS)
def test_one_token(op, sizes):
    """The rule of the error. A ratio of one token is v: where the truth is zero, no more than the rounding of terms as
    large as those without the ratio."""
    x, grad = make(1, BF16, sizes)
    check(op, x, grad, "plain")
    check(op, x, grad, "elu", **ELU)
    whole, exact = (truth(op, x, grad, **options) for options in (ELU, RATIO))
    first, second = twice(results, op, x, grad, impl="triton", **RATIO)
    for name, a, b, t, w in zip(NAMES, first, second, exact, whole, strict=True):
        assert torch.equal(a, b), name
        assert (a.double() - t).norm() <= (5e-3 * t if t.norm() > 1e-3 * w.norm() else 2**-8 * w).norm(), name


POLYNOMIALS = [
    *(({}, dtype, (8, 16, 16, d, d)) for dtype in (BF16, FP16) for d in (32, 64)),
    *(({}, BF16, sizes) for sizes in (MANY, MANY_ODD, ODD, WIDE, GROUPED, (2, 4, 4, 96, 96))),
    *((options, BF16, (8, 16, 16, 64, 64)) for options in (ANCHORED, RELU_QK, RATIO, ELU_CENTRED[0])),
    (ANCHORED, BF16, ODD),
    *((options, BF16, MANY_ODD) for options in (ANCHORED, {"center": "k"}, RATIO, RATIO_RELU)),
    (RATIO_RELU, BF16, (8, 16, 16, 64, 64)),
    *((RATIO_IDENTITY, BF16, sizes) for sizes in (MANY, MANY_ODD, FEW, ODD)),
    *((options, BF16, FEW) for options in (ELU, RELU_QK)),
    *((options, FP16, FEW) for options in ({**ELU, "scale": 1e-4}, RELU_QK)),  # larger ones leave float16
]


def check_polynomial(options, dtype, sizes, numbers, fixed):
    """The rule of the error for every number of tokens, in three draws. Coefficients of a ratio are positive: of both
    signs, a few tokens whose denominators nearly vanish would be all that the norm sees."""
    for n, draw in itertools.product(numbers, range(3)):
        x, grad = make(n, dtype, sizes, draw)
        if options is RATIO_IDENTITY:
            x = [x[0].abs(), x[1].abs(), x[2]]
        c = torch.randn(sizes[1], 4, generator=torch.Generator("cuda").manual_seed(n + draw), device="cuda")
        c = (c.abs() if options.get("normalize") else c).requires_grad_(not fixed)
        assert hk.explain("polynomial", *x, c, **options).fixed == fixed
        double = [t.double() for t in x]
        exact = of_polynomial(double, c.double(), grad.double(), dtype, impl="torch", **options)
        first, second = twice(of_polynomial, x, c, grad, impl="triton", **options)
        assert len(first) == 5 - fixed and all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), n
        check_tokens(first, exact, n)
        if not fixed:
            kept = prepare("polynomial", *x, c, **options).options
            check_coefficients(first[4], exact[4], sizes_of_coefficients(x, c, grad, kept), n)


@pytest.mark.parametrize("fixed", (False, True))
@pytest.mark.parametrize("case", POLYNOMIALS, ids=lambda c: f"{'-'.join(c[0])}-{str(c[1])[6:]}-{c[2][3]}")
def test_polynomial(case, fixed):
    """With float32 coefficients; of one token a ratio is v, and what is centred is zero."""
    options, dtype, sizes = case
    check_polynomial(options, dtype, sizes, (17, 197, 1025), fixed)
    if options in ({}, ELU) and dtype is BF16:  # float16 does not hold third orders of one token
        check_polynomial(options, dtype, (256, *sizes[1:]), (1,), fixed)  # v . g nearly vanishes in some of few samples


@pytest.mark.parametrize("fixed", (False, True))
def test_polynomial_of_many_tokens(fixed):
    """S and W of many tokens are nearly multiples of the identity: orders cancel where coefficients do."""
    check_polynomial({}, BF16, (2, 4, 4, 64, 64), (4097,), fixed)


@pytest.mark.parametrize("which", (0, 1, 2), ids=("q", "k", "v"))
@pytest.mark.parametrize("op", (*OPS, "polynomial"))
def test_channels_with_a_mean(op, which):
    """Twice their deviation: what a product gives a mean is far more than the gradient, and cancels with a row."""
    many = [(BF16, sizes, n) for sizes in (MANY, MANY_ODD) for n in (197, 1025)]
    others = (BF16, FEW, 333), (BF16, ODD, 333), (FP16, MANY, 197), (FP16, FEW, 333)
    for options, (dtype, sizes, n) in itertools.product((RATIO, ANCHORED, ELU_CENTRED[0]), (*many, *others)):
        wide = op == "polynomial" and options is ELU_CENTRED[0] and sizes[3] > 64
        if wide or (options is RATIO and dtype == FP16):  # has no Triton form
            continue
        x, grad = make(n, dtype, sizes)
        x[which] += 2
        more = [torch.full((sizes[1], 4), 0.25, device="cuda")] if op == "polynomial" else []
        check(op, x, grad, (options, dtype, sizes, n), *more, **options)


def test_polynomial_inference():
    """Without gradients, D = 64 takes one program a head, whose algebra has float16 factors."""
    for n in (1, 17, 197, 1025):
        x, _ = make(n, BF16, MANY)
        x.append(torch.randn(4, 4, generator=torch.Generator("cuda").manual_seed(n), device="cuda"))
        exact = hk.polynomial(*[t.double() for t in x], impl="torch")
        first, second = twice(hk.polynomial, *x, impl="triton")
        assert torch.equal(first, second)
        check_tokens([first], [exact], n)


@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
@pytest.mark.parametrize("op", OPS)
def test_inference(op, dtype):
    """Without gradients D = 72 takes the one-program form, or that of pairs, too."""
    forms = ({}, ANCHORED) if dtype == FP16 else ({}, RATIO, ANCHORED)  # a ratio in float16 has no Triton form
    for n, sizes, options in itertools.product((17, 333, 1025), (MANY_ODD, PAIRS), forms):
        x, _ = make(n, dtype, sizes)
        exact = truth(op, x, x[2], **options)[0]
        first, second = twice(getattr(hk, op), *x, impl="triton", **options)
        assert torch.equal(first, second)
        check_tokens([first], [exact], (n, sizes, options))


FLOAT16 = (
    ("hla2", (3, 17, 6, 6, 80, 80), {"feature_map": "softmax", "ridge": 0.1, "q_scale": 80**-0.5, "eps": 1e-9}, 1),
    ("hla3", (1, 17, 2, 2, 128, 128), {"feature_map": "softmax", "ridge": 0.1, "eps": 1e-9}, 1),
    ("ahla", (3, 17, 4, 4, 64, 128), {"feature_map": "softmax_pair", "ridge": 0.1}, 1),
    ("hla3", (1, 1167, 2, 2, 72, 48), {"feature_map": "softmax_pair"}, 1),
    ("hla3", (1, 17, 2, 2, 128, 128), {"feature_map": "elu1"}, 10),
    ("linear_attention", (1, 17, 2, 2, 64, 64), {"feature_map": "elu1"}, 300),
)


@pytest.mark.parametrize("case", FLOAT16, ids=lambda c: f"{c[0]}-{c[2]['feature_map']}-{c[1][4]}")
def test_ratios_in_float16(case):
    """Tokens, and lambda, whose operator is no number of float16: the rule of the error for whatever form is chosen."""
    op, (b, n, *sizes), options, size = case
    x, grad = make(n, FP16, (b, *sizes))
    x = [size * t for t in x]
    check(op, x, grad, "", **options, normalize=True, impl="auto")
