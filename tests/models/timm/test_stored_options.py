"""All options of mixers are stored with a model, so that defaults may change."""

import dataclasses
import json
import warnings

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf

import zoo
from tests.helpers.tiny_models import MIXERS, NARROW, SIZE, image, sites, stir, tiny
from zoo.mixers.hla import AHLA
from zoo.mixers.options import MixerOptions
from zoo.mixers.poly import Polynomial, PolynomialOptions
from zoo.models import CONVERTED, hla_name
from zoo.models.checkpoint_tags import decode_tag, encode_tag
from zoo.models.digests import DIGEST
from zoo.models.timm.model_files import HEADER, Recipe, build, load_model, save_weights

BASE = "vit_tiny_patch16_224"
TAGGED = (  # the options in the tags of earlier files
    *("feature_map", "normalize", "center", "mean_path", "causal", "scan", "ridge", "order", "blocks", "mixing"),
)
EARLIER = {  # what the defaults were when files held only what differed from them
    "ahla": {"feature_map": "elu1"},
    "poly": {"feature_map": "identity", "normalize": False, "center": "k", "mean_path": True},
}


@pytest.fixture
def other_defaults(monkeypatch):
    """Another feature map than the earlier ones by default."""
    monkeypatch.setattr(AHLA, "defaults", MixerOptions(feature_map="relu"))
    monkeypatch.setattr(Polynomial, "defaults", PolynomialOptions(feature_map="relu", normalize=True))


def earlier_tags(weights: dict) -> dict:
    """Weights with the tags of earlier files."""
    found = dict(weights)
    for key in [key for key in weights if key.endswith(".mixer.tag")]:
        tag = decode_tag(weights[key])
        text = json.dumps({k: v for k, v in tag.items() if k in ("mixer", *TAGGED)})
        found[key] = torch.tensor([2 * byte for byte in text.encode("ascii")], dtype=torch.uint8)
    return found


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_tag_holds_every_option(mixer):
    made = sites(tiny(hla_name(BASE, mixer)))[0].mixer
    names = {field.name for field in dataclasses.fields(made.options)}
    assert decode_tag(encode_tag(made.config)).keys() == {"mixer", *names}


@pytest.mark.parametrize("option", [{"radius": 1}, {"degree": 2}])
def test_options_without_a_trace_among_the_parameters_are_compared(option):
    name, none = hla_name(BASE, "multipole"), {"radius": 0, "degree": 0}
    weights = tiny(name, mixer_options={**none, **option}).state_dict()
    with pytest.warns(UserWarning, match=f"{next(iter(option))}={next(iter(option.values()))}"):
        tiny(name, mixer_options=none).load_state_dict(weights)


@pytest.mark.parametrize("mixer", EARLIER)
def test_a_file_of_weights_from_before_keeps_its_map(mixer, tmp_path, other_defaults):
    recipe = Recipe(BASE, {k: v for k, v in NARROW.items() if k != "num_classes"}, SIZE, 5, mixer, EARLIER[mixer])
    model = build(recipe)
    stir(model)
    save_weights(model, recipe, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        header = opened.metadata()
    del header[DIGEST]  # earlier files have none
    written = json.loads(header[HEADER])
    header[HEADER] = json.dumps({**written, "mixer_options": {}})
    weights = earlier_tags(load_file(tmp_path / "model.safetensors"))
    save_file(weights, tmp_path / "earlier.safetensors", header)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, found = load_model(tmp_path / "earlier.safetensors")
    assert torch.equal(again.eval()(image()), model.eval()(image()))
    assert found.mixer_options == EARLIER[mixer]


@pytest.mark.parametrize("mixer", EARLIER)
@pytest.mark.parametrize("general", [False, True])
def test_timm_s_format_from_before_keeps_its_map(mixer, general, tmp_path, other_defaults):
    step = {"mixer": mixer, "options": EARLIER[mixer]}
    named = {"mixer_options": EARLIER[mixer]}
    model = tiny(CONVERTED, base=BASE, conversions=[step]) if general else tiny(hla_name(BASE, mixer), **named)
    stir(model)
    save_for_hf(model, tmp_path, safe_serialization=True, model_args={"img_size": SIZE, **NARROW, **model.hla_args})
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_args"].pop("mixer_options", None)
    if general:
        config["architecture"] = CONVERTED
        config["model_args"] |= {"base": BASE, "conversions": [{"mixer": mixer}]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = next(tmp_path.glob("*.safetensors"))
    save_file(earlier_tags(load_file(file)), file, {"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert torch.equal(again.eval()(image()), model.eval()(image()))
    fresh = timm.create_model(hla_name(BASE, mixer), img_size=SIZE, **NARROW)
    assert sites(fresh)[0].mixer.options.feature_map == "relu"


def test_a_saved_model_keeps_the_defaults_it_was_made_with(tmp_path, monkeypatch):
    model = tiny(hla_name(BASE, "ahla"))
    save_for_hf(model, tmp_path, safe_serialization=True, model_args={"img_size": SIZE, **NARROW, **model.hla_args})
    name = "relu" if model.blocks[0].attn.mixer.options.feature_map != "relu" else "elu1"
    monkeypatch.setattr(AHLA, "defaults", MixerOptions(feature_map=name))
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert torch.equal(again.eval()(image()), model.eval()(image()))
    zoo.convert(again, "ahla")
    assert sites(again)[0].mixer.options.feature_map == name
