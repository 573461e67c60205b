"""A softmax mixer in every layer reproduces the host bit for bit: outputs and gradients, every family."""

import pytest
import torch
from tiny_diffusers import CASES, gradients, host, inputs, run

import zoo


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_softmax_is_the_host(name, dtype):
    model, wanted = host(name).to(dtype), host(name).to(dtype)
    report = zoo.convert(model, "softmax")
    assert report.swapped and report.added == 0
    arguments = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs(name).items()}
    found, expected = run(model, arguments), run(wanted, arguments)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    theirs = gradients(wanted)
    assert theirs and all(torch.equal(theirs[n], g) for n, g in gradients(model).items())
