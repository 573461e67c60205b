"""`zoo.convert` on diffusers models: what is swapped, what is kept, what is said."""

import pytest
import torch
from tiny_diffusers import CASES, converted, host, inputs, run, sites

import zoo
from zoo.backbones.registry import REGISTERED_MIXERS


@pytest.mark.parametrize("mixer", REGISTERED_MIXERS)
@pytest.mark.parametrize("name", CASES)
def test_every_weight_is_inherited_by_identity_and_gets_a_gradient(name, mixer):
    model = host(name)
    before = dict(model.named_parameters())
    report = zoo.convert(model, mixer, post_norm=True, gate=True, depthwise="v")
    after = dict(model.named_parameters())
    assert all(after[n] is p for n, p in before.items())
    new = {n: p for n, p in after.items() if n not in before}
    assert new and all(".mixer." in n for n in new)
    assert report.added == sum(p.numel() for p in new.values())
    y = run(model.train(), inputs(name))
    y.square().sum().backward()
    missing = [n for n, p in after.items() if p.grad is None]
    assert y.isfinite().all() and not [n for n in missing if ".mixer." in n or ".to_" in n]


@pytest.mark.parametrize("name", CASES)
def test_keep_softmax_every_third(name):
    model = converted(name, "ahla", keep_softmax="every:3")
    kept = [row.layer for row in zoo.convert(model, "la", keep_softmax="every:3").skipped]
    assert any(".0." in name for name in kept) and {site.mixer_name for site in sites(model)} == {"la"}
    assert run(model, inputs(name)).isfinite().all()


@pytest.mark.parametrize("name", CASES)
def test_two_resolutions_in_one_backward_with_checkpointing(name):
    gradients = []
    for checkpointing in (False, True):
        model = converted(name, "ahla", depthwise="qkv")
        if checkpointing:
            model.enable_gradient_checkpointing()
        loss = sum(run(model, inputs(name, size=size)).square().mean() for size in (8, 12))
        loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[1][n], g) for n, g in gradients[0].items())
