"""A softmax mixer in every layer reproduces the host bit for bit: outputs and gradients, every family."""

import json

import pytest
import torch
from diffusers.models.attention_processor import SanaLinearAttnProcessor2_0
from diffusers.models.transformers.sana_transformer import SanaAttnProcessor2_0

import zoo
from tests.helpers.tiny_diffusers import CASES, gradients, host, inputs, record, run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_softmax_is_the_host(name, dtype):
    model, wanted = host(name).to(dtype), host(name).to(dtype)
    report = zoo.convert(model, "softmax")
    assert report.swapped and report.added == 0
    if record(name).mixer != "softmax":  # Sana: with the softmax processor of its cross-attention
        for block in wanted.transformer_blocks:
            block.attn1.set_processor(SanaAttnProcessor2_0())
    floats = {k: v.to(dtype) for k, v in inputs(name).items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    arguments = {**inputs(name), **floats}
    found, expected = run(model, arguments), run(wanted, arguments)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    theirs = gradients(wanted)
    assert theirs and all(torch.equal(theirs[n], g) for n, g in gradients(model).items())


@pytest.mark.parametrize("name", [name for name in CASES if record(name).mixer == "la"])
def test_first_order_attention_is_that_of_sana(name):
    model, wanted = host(name).double(), host(name).double()
    assert isinstance(model.transformer_blocks[0].attn1.processor, SanaLinearAttnProcessor2_0)
    report = zoo.convert(model, "la", feature_map="relu")
    assert {row.old for row in report.swapped} == {"la"}
    arguments = {k: v.double() if v.is_floating_point() else v for k, v in inputs(name).items()}
    # the host computes its sums in float32
    torch.testing.assert_close(run(model, arguments), run(wanted, arguments), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["dit", "wan"])
def test_softmax_with_weights_of_its_own_is_saved(name, tmp_path):
    """The convolution of a softmax mixer is a conversion; weights that no mixer takes are refused."""
    model = host(name)
    zoo.convert(model, "softmax", lepe=3)
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(tmp_path)
    assert torch.equal(run(zoo.load(tmp_path), inputs(name)), run(model, inputs(name)))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "conversions": []}))
    with pytest.raises(ValueError, match="no mixer"):
        type(model).from_pretrained(tmp_path)
