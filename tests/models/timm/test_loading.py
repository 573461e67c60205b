"""Checkpoints: softmax weights load strictly in timm, ours round-trip, other mixers raise errors."""

import json
import warnings
from dataclasses import replace

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from timm.utils import ModelEma, ModelEmaV2, ModelEmaV3

import zoo
from tests.helpers.mixers import options_of
from tests.helpers.tiny_diffusers import converted
from tests.helpers.tiny_models import MIXERS, NARROW, SIZE, image, sites, tiny
from zoo.models import hla_name
from zoo.models.checkpoint_tags import decode_tag, encode_tag
from zoo.models.timm.model_files import Recipe, build_host, save_weights

BASE = "vit_tiny_patch16_224"
OPTIONS = {"depthwise": "v", "gate": True}


def create(name="vit_ahla_tiny_patch16_224", **changes):
    return timm.create_model(name, **{"img_size": SIZE, **NARROW, **changes})


def assert_holds(model, weights):
    assert model.from_softmax
    for key, value in model.state_dict().items():
        assert ".mixer." in key or torch.equal(value, weights[key]), key


@pytest.mark.parametrize("mixer", MIXERS)
def test_softmax_weights_load_strictly_by_every_route(mixer, tmp_path):
    name, weights = hla_name(BASE, mixer), tiny(BASE).state_dict()
    save_file(weights, tmp_path / "base.safetensors")
    torch.save({"state_dict": weights}, tmp_path / "base.pth")
    routes = [
        {"pretrained": True, "pretrained_cfg_overlay": {"file": str(tmp_path / "base.safetensors"), "num_classes": 5}},
        {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": dict(weights), "num_classes": 5}},
        {"checkpoint_path": str(tmp_path / "base.pth")},
        {"checkpoint_path": str(tmp_path / "base.safetensors")},
    ]
    options = options_of(mixer, **OPTIONS)
    for route in routes:
        assert_holds(create(name, mixer_options=options, **route), weights)
    plain = create(name, mixer_options=options)
    plain.load_state_dict(weights)
    assert_holds(plain, weights)


def test_position_embeddings_are_resampled_as_in_the_base():
    weights = tiny(BASE).state_dict()
    overlay = {"state_dict": weights, "num_classes": 5, "input_size": (3, SIZE, SIZE)}
    grown = [
        create(n, img_size=96, pretrained=True, pretrained_cfg_overlay=overlay)
        for n in (BASE, "vit_la_tiny_patch16_224")
    ]
    assert grown[1].pos_embed.shape == (1, 37, 32)
    assert torch.equal(grown[0].pos_embed, grown[1].pos_embed)


def test_base_weights_of_the_other_families():
    for base in (
        "deit_tiny_distilled_patch16_224",
        "deit3_small_patch16_224",
        "flexivit_small",
        "vit_little_patch16_reg4_gap_256",
    ):
        weights = tiny(base).state_dict()
        model = create(
            hla_name(base, "hla2"), pretrained=True, pretrained_cfg_overlay={"state_dict": weights, "num_classes": 5}
        )
        assert_holds(model, weights)


def test_a_new_head_keeps_the_rest():
    weights = tiny(BASE).state_dict()
    model = create(
        num_classes=7, pretrained=True, pretrained_cfg_overlay={"state_dict": dict(weights), "num_classes": 5}
    )
    assert_holds(model.cpu(), {**weights, "head.weight": model.head.weight, "head.bias": model.head.bias})


@pytest.mark.parametrize("change", ["missing", "unexpected", "partly ours"])
def test_strictness_is_kept(change):
    model = create(mixer_options=OPTIONS)
    weights = tiny(BASE).state_dict()
    if change == "missing":
        del weights["blocks.1.mlp.fc1.weight"]
    elif change == "unexpected":
        weights["blocks.1.extra"] = torch.zeros(1)
    else:
        weights |= {k: v for k, v in model.state_dict().items() if "blocks" in k and "gate" not in k}
    with pytest.raises(RuntimeError, match=r"Missing|Unexpected"):
        model.load_state_dict(weights)


@pytest.mark.parametrize("mixer", MIXERS)
def test_our_weights_round_trip(mixer, tmp_path):
    options = options_of(mixer, **OPTIONS, post_norm=True)
    model = tiny(hla_name(BASE, mixer), mixer_options=options, keep_softmax=[0])
    save_file(model.state_dict(), tmp_path / "ours.safetensors")
    again = create(
        hla_name(BASE, mixer),
        mixer_options=options,
        keep_softmax=[0],
        checkpoint_path=str(tmp_path / "ours.safetensors"),
    )
    assert not again.from_softmax
    assert torch.equal(again(image()), model(image()))


def save(model, folder, safe: bool = True, **arguments):
    """timm's hub format; older versions of timm do not remember the arguments of `create_model`."""
    arguments = {"img_size": SIZE, **NARROW, **arguments}
    extra = {} if hasattr(model, "_model_args") else {"model_args": arguments}
    save_for_hf(model, folder, safe_serialization=safe, **extra)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("base", [BASE, "deit_tiny_distilled_patch16_224", "flexivit_small"])
def test_hub_format_round_trip(base, safe, tmp_path):
    options = {"mixer_options": OPTIONS, "keep_softmax": "every:2", "depth": 4}
    model = tiny(hla_name(base, "hla2"), **options)
    save(model, tmp_path, safe, **options)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architecture"] == hla_name(base, "hla2")
    assert OPTIONS.items() <= config["model_args"]["mixer_options"].items()
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert [s.mixer_name for s in sites(again)] == ["hla2", "hla2"]
    assert torch.equal(again.eval()(image()), model.eval()(image()))
    features = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, features_only=True)
    assert torch.equal(features(image())[-1], model.forward_intermediates(image(), indices=[3])[1][0])


def test_a_converted_model_is_saved_under_its_new_name(tmp_path):
    model = tiny(BASE)
    zoo.convert(model, "poly", keep_softmax=[1], gate=True)
    save(model, tmp_path, mixer_options={"gate": True}, keep_softmax=[1])
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert again.default_cfg["architecture"] == "vit_poly_tiny_patch16_224"
    assert torch.equal(again.eval()(image()), model.eval()(image()))


def test_another_mixer_is_refused():
    weights = {m: create(hla_name(BASE, m)).state_dict() for m in MIXERS}
    for ours in MIXERS:
        model = create(hla_name(BASE, ours))
        for theirs in MIXERS:
            if ours != theirs:
                with pytest.raises(ValueError, match=f"made with the mixer '{theirs}' in blocks.0.attn.*has '{ours}'"):
                    model.load_state_dict(weights[theirs])


def test_mixed_stacks_must_agree_layer_by_layer():
    hybrid = create(keep_softmax=[0])
    with pytest.raises(ValueError, match=r"mixer 'softmax' in blocks\.0\.attn, but the model has 'ahla'"):
        create().load_state_dict(hybrid.state_dict())
    softmax = tiny(BASE)
    zoo.convert(softmax, "softmax")
    with pytest.raises(ValueError, match=r"mixer 'ahla' in blocks\.0\.attn, but the model has 'softmax'"):
        softmax.load_state_dict(create().state_dict())


def test_our_weights_do_not_enter_a_plain_softmax_model():
    with pytest.raises(RuntimeError, match=r"Unexpected key.*mixer\.tag"):
        tiny(BASE).load_state_dict(create().state_dict())


def test_other_options_are_said():
    weights = create(mixer_options={"feature_map": "relu"}).state_dict()
    with pytest.warns(
        UserWarning, match=r"other options of 'ahla' in blocks\.0\.attn: feature_map='relu' \(here 'elu1'\)"
    ) as said:
        create(mixer_options={"feature_map": "elu1"}).load_state_dict(weights)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        create().load_state_dict(create().state_dict())


def test_weights_that_do_not_fit_the_saved_options_are_refused(tmp_path):
    """A run folder, a folder of timm and one of diffusers whose configuration was edited; never a silent difference."""
    model, sentence = tiny(BASE), r"other options of 'ahla' in .*: feature_map='relu' \(here 'elu1'\)"
    zoo.convert(model, "ahla", feature_map="relu")
    recipe = Recipe(BASE, {k: v for k, v in NARROW.items() if k != "num_classes"}, SIZE, 5, "ahla")
    save_weights(model, replace(recipe, mixer_options={"feature_map": "elu1"}), tmp_path / "run" / "model.safetensors")
    zoo.save(model, tmp_path / "timm")
    transformer = converted("dit", "ahla", feature_map="relu")
    zoo.save(transformer, tmp_path / "diffusers")
    for folder in ("timm", "diffusers"):
        file = tmp_path / folder / "config.json"
        file.write_text(file.read_text().replace('"relu"', '"elu1"'))
    for folder in ("run", "timm", "diffusers"):
        with pytest.raises(ValueError, match=sentence):
            zoo.load(tmp_path / folder)
    weights = model.state_dict()
    other = create(mixer_options={"feature_map": "elu1"})
    with pytest.warns(UserWarning, match=sentence):
        other.load_state_dict(weights, strict=False)


def test_options_that_an_earlier_tag_omits_are_compared():
    weights, earlier = create(mixer_options={"feature_map": "elu1"}).state_dict(), {"mixer": "ahla"}
    tag = torch.tensor([2 * byte for byte in json.dumps(earlier).encode("ascii")], dtype=torch.uint8)
    weights |= {key: tag for key in weights if key.endswith(".mixer.tag")}
    with pytest.warns(UserWarning, match=r"feature_map='elu1' \(here 'relu'\)"):
        create(mixer_options={"feature_map": "relu"}).load_state_dict(weights)


def test_tags_survive_averages_and_casts():
    model = tiny("vit_hla2_tiny_patch16_224")
    averages = [ModelEmaV2(model, decay=0.9999), ModelEma(model, decay=0.9995)]
    for average in averages:
        for _ in range(50):
            average.update(model)
    v3 = ModelEmaV3(model, decay=0.99)
    for step in range(5):
        v3.update(model, step=step)
    weights = [averages[0].module.state_dict(), averages[1].ema.state_dict(), v3.module.state_dict()]
    weights.append({k: v.double().add(v.double()).div(2).float() for k, v in model.state_dict().items()})
    weights.append(tiny("vit_hla2_tiny_patch16_224").bfloat16().state_dict())
    for found in weights:
        assert decode_tag(found["blocks.0.attn.mixer.tag"])["mixer"] == "hla2"
        create("vit_hla2_tiny_patch16_224").load_state_dict(found)
        with pytest.raises(ValueError, match="mixer 'hla2'"):
            create().load_state_dict(found)


def test_a_damaged_tag_is_said():
    weights = create().state_dict()
    weights["blocks.1.attn.mixer.tag"] = torch.zeros(9, dtype=torch.uint8)
    with pytest.raises(ValueError, match="damaged mixer tag"):
        create().load_state_dict(weights)
    mixer = sites(create())[0].mixer
    assert decode_tag(encode_tag(mixer.config))["feature_map"] == "power"


def test_wrapped_and_compiled_models_load():
    model, weights = create(), tiny(BASE).state_dict()
    wrapped = torch.nn.ModuleDict({"model": model})
    wrapped.load_state_dict({f"model.{k}": v for k, v in weights.items()})
    assert_holds(model, weights)
    compiled = torch.compile(create())
    compiled.load_state_dict({f"_orig_mod.{k}": v for k, v in weights.items()})


def test_files_hold_only_plain_tensors(tmp_path):
    save_file(tiny("vit_ahla_tiny_patch16_224").state_dict(), tmp_path / "a.safetensors")
    assert all(isinstance(v, torch.Tensor) for v in load_file(tmp_path / "a.safetensors").values())


def test_meta_models_are_initialised_and_loaded():
    options = {"depthwise": "qkv", "gate": True, "post_norm": True, "feature_map": "hedgehog"}
    model = create(mixer_options=options, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(7)
    model.init_weights()
    fresh = create(mixer_options=options).state_dict()
    assert all(torch.equal(v, fresh[k]) for k, v in model.state_dict().items() if ".mixer." in k)
    lazy = create(mixer_options=options, device="meta")
    lazy.load_state_dict(fresh, assign=True)
    again = create(mixer_options=options)
    again.load_state_dict(fresh)
    assert torch.equal(lazy(image()), again(image()))


def test_an_overlay_may_describe_images_alone():
    """Of the pretrained configuration, a recipe may change what images the model reads, not where weights lie."""
    small = Recipe("resnet18", {"pretrained_cfg_overlay": {"input_size": [3, 32, 32]}}, num_classes=5)
    assert list(build_host(small).pretrained_cfg["input_size"]) == [3, 32, 32]
    for overlay in ({"file": "x.pth"}, {"input_size": [3, 32, 32], "hf_hub_id": "a/b"}, "x.pth"):
        with pytest.raises(ValueError, match="may hold crop_mode"):
            build_host(Recipe("resnet18", {"pretrained_cfg_overlay": overlay}))
