"""The simulation of exact tiles is the operator: chosen by error alone, and nearest tiles alone."""

import pytest
import torch

import hla_kernels
from tests.helpers.runs import ROOT


@pytest.mark.parametrize("far", ["first", "mean"])
@pytest.mark.parametrize(("near", "select"), [(0.0, "error"), (1.0, "near")])
def test_exact_tiles_are_those_of_the_operator(near, select, far, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    from two_levels import attention

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 577, 3, 16) for _ in range(3))
    given = {"density": 0.25, "far": far, "grid": (24, 24), "prefix": 1, "suffix": 0, "q_scale": 0.5}
    found = attention(q, k, v, levels=(16, 0, 0.0, near), **given)
    torch.testing.assert_close(found, hla_kernels.adaptive_multipole(q, k, v, select=select, k_tile=16, **given))
    mixed = attention(q, k, v, levels=(16, 0, 0.0, 0.5), **given)
    assert (mixed - found).norm() > 0.1 * found.norm()
