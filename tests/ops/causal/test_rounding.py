"""The emulation of rounded causal ratios: its equations, and the dtype that their gradients need."""

import pytest
import torch

from hla_kernels.hla.reference import reference
from hla_kernels.options import Options
from tests.ops.causal.rounding import INNER, bfloat16, errors, gradients, setting, tf32


@pytest.mark.parametrize("op", INNER)
def test_equations(op):
    """Without rounding, the gradients of the definition."""
    q, k, v, g = setting(50, 0)
    x = [t.view(1, 50, 1, 64).requires_grad_() for t in (q, k, v)]
    o = reference(op, *x, Options(causal=True, normalize=True, eps=0.0), None)
    expected = [o, *torch.autograd.grad(o, x, g.view_as(o))]
    for a, b in zip(gradients(op, q.detach(), k.detach(), v.detach(), g, {}), expected, strict=True):
        torch.testing.assert_close(a.view_as(b), b.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("op", INNER)
def test_tf32_is_enough(op):
    """Of higher orders, bfloat16 stages have errors of about 5e-3, stages in TF32 (those of float16) a fourth."""
    low, high = (max(errors(op, f"do weights {INNER[op]}", f, n=300, heads=2)) for f in (bfloat16, tf32))
    assert high <= 2e-3 and low >= 2 * high
