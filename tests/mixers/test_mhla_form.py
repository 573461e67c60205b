"""The form of the operator that the mixer `mhla` reaches."""

import math

import pytest
import torch

from hla_kernels import op
from hla_kernels.blockmix.fused.spec import by_pairs
from zoo.mixers import Context, build_mixer


@pytest.mark.parametrize(("grid", "pairs"), [((16, 16), True), ((32, 32), False)], ids=str)
def test_few_tokens_are_mixed_by_pairs(monkeypatch, grid, pairs):
    """The default mixer in bfloat16 leaves no feature map to the operator, since the form by pairs has none."""
    calls, choose = [], op.choose
    monkeypatch.setattr(op, "choose", lambda call, impl: calls.append(call) or choose(call, impl))
    n = math.prod(grid)
    mixer = build_mixer("mhla", 128, 2, 64, grid=grid)
    tokens = [torch.randn(1, n, 2, 64).bfloat16() for _ in range(3)]
    mixer(*tokens, Context(x=torch.randn(1, n, 128), grid=grid))
    assert [by_pairs(call.q, call.v, call.options, False) for call in calls] == [pairs]
