"""The operations that FlopCounterMode counts for the custom operators are those of the products that they run."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import hla_kernels as hk
from hla_kernels.hla.causal import causal
from hla_kernels.hla.gradient import gradient
from hla_kernels.hla.two_sided import evaluate
from hla_kernels.options import Options
from tests.ops.cases import LINEAR, extra, tokens


def counted(f) -> int:
    with FlopCounterMode(display=False) as counter:
        f()
    return counter.get_total_flops()


@pytest.mark.parametrize("feature_map", [None, "softmax_pair"])
@pytest.mark.parametrize("op", LINEAR)
def test_formulas_are_the_products_that_run(op, feature_map):
    q, k, v = (t.requires_grad_() for t in tokens(70, h=4, hk=4, d=8, dv=6))
    c, options = (extra(op) or (None,))[0], Options(feature_map=feature_map)
    grad = torch.ones(2, 70, 4, 6, dtype=q.dtype)
    inside = counted(lambda: evaluate(op, q, k, v, c, options))
    back = counted(lambda: gradient(op, grad, q, k, v, c, options))
    more = extra(op)
    y = getattr(hk, op)(q, k, v, *more, feature_map=feature_map)
    assert counted(lambda: getattr(hk, op)(q, k, v, *more, feature_map=feature_map)) == inside > 0
    assert counted(lambda: torch.autograd.grad(y, (q, k, v), grad)) == back > inside


@pytest.mark.parametrize("op", LINEAR)
def test_packed_and_grouped(op):
    """qkv counts as q, k, v; shared keys cost less; packed sequences have an operator each; a mask changes nothing."""
    x = tokens(60, h=4, hk=4, d=8, dv=8, b=1)
    f, more = getattr(hk, op), extra(op)
    plain = counted(lambda: f(*x, *more))
    qkv = torch.stack(x, 2).requires_grad_()
    packed = getattr(hk, op + "_qkvpacked")
    assert counted(lambda: packed(qkv, *more)) == plain
    both = counted(lambda: packed(qkv, *more).sum().backward())
    assert both > 2 * plain
    shared = counted(lambda: f(*tokens(60, h=4, hk=1, d=8, dv=8, b=1), *more))
    assert shared < plain if op in ("hla2", "hla3", "linear_attention", "polynomial") else shared <= plain
    assert counted(lambda: f(*x, *more, key_padding_mask=torch.ones(1, 60, dtype=torch.bool))) == plain
    cu = torch.tensor([0, 20, 60], dtype=torch.int32)
    products = {"linear_attention": 0, "hla2": 1, "ahla": 1, "hla3": 2, "polynomial": 4}[op] * 2 * 4 * 8**3
    assert counted(lambda: f(*x, *more, cu_seqlens=cu, max_seqlen=40)) == plain + products


@pytest.mark.parametrize("decay", (None, 0.9))
@pytest.mark.parametrize("op", ("linear_attention", "hla2", "ahla", "hla3"))
def test_causal(op, decay):
    """The products of the stages and, for the backward, of the stages and their gradients; which are right there."""
    x = [t.requires_grad_() for t in tokens(70, h=4, hk=2, d=8, dv=6)]
    gamma = None if decay is None else x[0].new_full((1,) * 5, decay)
    options = Options(True, decay=decay)
    f = lambda: causal(op, *x, options, gamma, None, False)[0]  # noqa: E731
    g = lambda: getattr(hk, op)(*x, causal=True, decay=decay)  # noqa: E731
    assert counted(g) == counted(f) > 0
    expected, found = [], []
    both = counted(lambda: expected.extend(torch.autograd.grad(f().sum(), x)))
    y = g()
    assert counted(lambda: found.extend(torch.autograd.grad(y.sum(), x))) == both
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_linear_cost():
    f = lambda n: counted(lambda: hk.ahla(*tokens(n)))  # noqa: E731
    assert f(4096) - f(2048) == f(3072) - f(1024)
