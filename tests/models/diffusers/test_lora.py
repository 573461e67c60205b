"""LoRA of converted models through peft: the mixers are trained whole and travel with the adapter."""

import copy

import pytest
import torch
from peft import LoraConfig

from tests.helpers.tiny_diffusers import CASES, close, converted, gradients, inputs, run

LORA = {"r": 4, "target_modules": ["to_q", "to_k", "to_v", "to_out.0"], "modules_to_save": ["mixer"]}


@pytest.mark.parametrize("name", CASES)
def test_lora_trains_saves_loads_and_fuses(name, tmp_path):
    model = converted(name, "ahla", gate=True, depthwise="v")
    fresh = copy.deepcopy(model)
    model.add_adapter(LoraConfig(**LORA), adapter_name="default")
    before = run(model, inputs(name)).detach()
    run(model, inputs(name)).square().mean().backward()
    got = gradients(model)
    assert any("lora_B" in n for n in got) and any(".mixer.modules_to_save" in n for n in got)
    with torch.no_grad():  # more than a step of an optimizer, which hardly changes the output of some models
        for p in model.parameters():
            p.add_(torch.randn_like(p) * p.requires_grad, alpha=0.1)
    after = run(model, inputs(name)).detach()
    assert (after - before).norm() > 0.01 * before.norm()
    model.save_lora_adapter(tmp_path)
    fresh.load_lora_adapter(tmp_path, weight_name="pytorch_lora_weights.safetensors", prefix=None)
    close(run(fresh, inputs(name)), after)
    fresh.fuse_lora()
    close(run(fresh, inputs(name)), after)
