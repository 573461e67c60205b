"""`zoo.revert`: the host's model again."""

import copy

import pytest
import timm
import torch

import zoo
from tests.helpers.tiny_diffusers import CASES, host, run
from tests.helpers.tiny_models import image, tiny
from tests.helpers.tiny_pipelines import pipeline

TIMM = [
    ("vit_tiny_patch16_224", {}),
    ("deit_tiny_distilled_patch16_224", {}),
    ("vit_small_patch16_dinov3", {}),
    ("naflexvit_base_patch16_gap", {"img_size": None}),
]


def kinds(model: torch.nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize(("name", "changes"), TIMM)
@pytest.mark.parametrize("steps", [[{"mixer": "la"}], [{"mixer": "mhla", "depthwise": "v"}, {"mixer": "softmax"}]])
def test_timm_models_are_what_they_were(name, changes, steps):
    model = tiny(name, **changes).eval()
    before = copy.deepcopy(model)
    for step in steps:
        zoo.convert(model, **step)
    zoo.revert(model)
    assert kinds(model) == kinds(before)
    assert list(model.state_dict()) == list(before.state_dict())
    assert torch.equal(model(image()), before(image()))
    assert vars(model).keys() == vars(before).keys()
    assert model.pretrained_cfg == before.pretrained_cfg
    assert getattr(model, "_model_args", None) == getattr(before, "_model_args", None)


def test_a_reverted_model_saves_converts_and_checkpoints_as_its_host(tmp_path):
    model = tiny("vit_tiny_patch16_224").eval()
    model.set_grad_checkpointing(True)
    zoo.convert(model, "la")
    zoo.revert(model)
    assert model.grad_checkpointing
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert type(again) is type(model)
    assert torch.equal(again(image()), model(image()))
    zoo.convert(model, "hla2")
    assert type(model).__name__ == "HLAVisionTransformer"


@pytest.mark.parametrize("name", CASES)
def test_diffusers_models_are_what_they_were(name, tmp_path):
    model = host(name)
    before = copy.deepcopy(model)
    zoo.convert(model, "la")
    zoo.revert(model)
    assert kinds(model) == kinds(before)
    assert dict(model.config) == dict(before.config)
    assert list(model.state_dict()) == list(before.state_dict())
    assert torch.equal(run(model, CASES[name].inputs()), run(before, CASES[name].inputs()))
    model.save_pretrained(tmp_path)
    assert type(type(before).from_pretrained(tmp_path)) is type(before)


def test_pipelines_name_the_host_again():
    pipe, _ = pipeline("dit")
    before = dict(pipe.config)
    zoo.convert(pipe, "la")
    zoo.revert(pipe)
    assert dict(pipe.config) == before


def test_a_model_that_was_not_converted_is_refused():
    with pytest.raises(ValueError, match="not converted"):
        zoo.revert(tiny("vit_tiny_patch16_224"))
    with pytest.raises(ValueError, match="not converted"):
        zoo.revert(host("dit"))
