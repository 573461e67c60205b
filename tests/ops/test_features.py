"""Feature maps against torch's own functions and explicit sums, and the ratio normaliser on small features."""

import math

import pytest
import torch

import hla_kernels as hk
from hla_kernels.features import feature, feature_grad
from hla_kernels.hla.reference import phi
from tests.ops.cases import BOTH_MODES, assert_same, error

EXPLICIT = {
    "identity": lambda x: x,
    "relu": lambda x: torch.clamp(x, min=0),
    "elu1": lambda x: torch.nn.functional.elu(x) + 1,
    "softmax": lambda x: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True),
    "softmax_pair": lambda x: torch.cat([torch.nn.functional.softmax(y, -1) for y in (x, -x)], -1),
}


def inputs():
    return torch.randn(3, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("name", hk.FEATURE_MAPS)
def test_maps(name):
    """The torch form's map, the definition's own, and their derivatives, against torch."""
    x = inputs().requires_grad_()
    truth = EXPLICIT[name](x)
    weight = torch.cat([inputs().flip(0), inputs().flip(1)], -1)[..., : truth.shape[-1]]
    d_truth = torch.autograd.grad(truth, x, weight)[0]
    for form in (feature, phi):
        y = form(x, name)
        assert_same(y, truth, 1e-14)
        assert_same(torch.autograd.grad(y, x, weight)[0], d_truth, 1e-14)
    assert_same(feature_grad(x, feature(x, name), weight, name).detach(), d_truth, 1e-14)


def test_derivative_of_elu1_at_zero():
    """1 from both sides, whatever torch says of a clamp that touches its bound."""
    for dtype, zero in ((torch.float64, 0.0), (torch.bfloat16, -0.0)):
        x = torch.full((40,), zero, dtype=dtype, requires_grad=True)
        for form in (feature, phi):
            assert bool((torch.autograd.grad(form(x, "elu1").sum(), x)[0] == 1).all())


def test_maps_by_numbers():
    x = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    e = math.e
    total, other = 1 / e + 1 + e * e, e**3 + e * e + 1
    values = {
        "identity": [-1.0, 0.0, 2.0], "relu": [0.0, 0.0, 2.0], "elu1": [1 / e, 1.0, 3.0],
        "softmax": [1 / e / total, 1 / total, e * e / total],
        "softmax_pair": [1 / e / total, 1 / total, e * e / total, e**3 / other, e * e / other, 1 / other],
    }  # fmt: skip
    assert set(values) == set(hk.FEATURE_MAPS)
    for name, value in values.items():
        for form in (feature, phi):
            assert_same(form(x, name), torch.tensor(value, dtype=torch.float64), 1e-15)


@pytest.mark.parametrize("form", [feature, phi])
def test_maps_at_the_ends(form):
    """elu1 stays positive where elu + 1 rounds to 0; nothing overflows; NaN stays NaN."""
    x = torch.tensor([-80.0, -20.0, 80.0, 1000.0])
    assert bool((form(x, "elu1") > 0).all()) and float(form(x, "elu1")[3]) == 1001.0
    for name in hk.FEATURE_MAPS:
        assert bool(torch.isfinite(form(x, name)).all())
        assert bool(form(torch.tensor([1.0, float("nan")]), name).isnan().any())


@pytest.mark.parametrize("name", hk.FEATURE_MAPS)
@pytest.mark.parametrize("causal", [False, True])
def test_operator_applies_the_map_to_queries_and_keys(name, causal):
    """feature_map="f" of q, k is "identity" of f(q), f(k), with f torch's own."""
    q, k = inputs()[:, :, None], inputs().flip(1)[:, :, None]
    v = inputs()[:, :, None, :2]
    ours = hk.hla3(q, k, v, feature_map=name, causal=causal)
    explicit = hk.hla3(EXPLICIT[name](q), EXPLICIT[name](k), v, feature_map="identity", causal=causal)
    assert_same(ours, explicit, 1e-12)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", ["softmax", "elu1"])
@pytest.mark.parametrize(("op", "causal"), BOTH_MODES)
def test_constants_with_a_small_eps(op, causal, name, d):
    """v = 1 comes out within 1e-3 of 1 at N = 197 with eps = 1e-9 (float32). The divisor of hla3 on the softmax map is
    about D^-3 = 5e-7 at D = 128: there the same holds with eps = 1e-12, and 1e-9 leaves eps D^3 = 2e-3, as `api` says.
    """
    gen = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 197, 2, d, generator=gen) for _ in range(2))
    v = torch.ones(1, 197, 2, 3)
    more = (torch.full((2, 4), 0.25),) if op == "polynomial" else ()
    options = {"causal": causal, "feature_map": name, "normalize": True}
    third = (op, name, d) == ("hla3", "softmax", 128)
    y = getattr(hk, op)(q, k, v, *more, **options, eps=1e-12 if third else 1e-9)
    assert error(y, v) < 1e-3
    if third:
        assert 1e-3 < error(getattr(hk, op)(q, k, v, **options, eps=1e-9), v) < 2 * 1e-9 * d**3
