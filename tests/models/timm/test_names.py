"""Registered names: timm's registry, shapes and transform of the base model, keywords."""

import pickle
import warnings

import pytest
import timm
import torch
from timm.data import resolve_data_config

from tests.helpers.mixers import options_of
from tests.helpers.tiny_models import MIXERS, NARROW, SIZE, image, sites, tiny, without_values
from zoo.mixers import MIXERS as CLASSES
from zoo.models import hla_name
from zoo.models.timm import deit, vision_transformer

BASES = [*vision_transformer.VIT_BASES, *deit.DEIT_BASES]


def test_there_are_enough_names():
    assert len(BASES) >= 12 and set(MIXERS) == CLASSES.keys() - {"softmax"}
    names = set(timm.list_models())
    assert {hla_name(base, mixer) for base in BASES for mixer in MIXERS} <= names
    assert len(timm.list_models("vit_ahla_*", module="vision_transformer")) >= 12
    assert "deit3_hla2_small_patch16_224" in timm.list_models(module="deit")
    assert "deit_poly_tiny_distilled_patch16_224" in timm.list_models("deit_*")
    assert "flexivit_la_small" in timm.list_models("*_la_*")


def test_no_name_claims_weights():
    ours = {hla_name(base, mixer) for base in BASES for mixer in MIXERS}
    assert not [n for n in timm.list_pretrained() if n.split(".")[0] in ours]
    with pytest.raises(ValueError, match=r"create_model\('vit_tiny_patch16_224', pretrained=True\); zoo.convert"):
        timm.create_model("vit_ahla_tiny_patch16_224", pretrained=True, img_size=SIZE, **NARROW)
    with pytest.raises(ValueError, match=r"create_model\('vit_tiny_patch16_224.augreg_in21k', pretrained=True\); zoo"):
        timm.create_model("vit_ahla_tiny_patch16_224.augreg_in21k", img_size=SIZE, **NARROW)


@pytest.mark.parametrize("base", BASES)
def test_shapes_and_transform_are_those_of_the_base(base):
    host = without_values(base)
    shapes = {k: v.shape for k, v in host.state_dict().items()}
    first = BASES.index(base)
    for mixer in {MIXERS[i % len(MIXERS)] for i in (first, first + 10)}:  # every mixer with several bases
        model = without_values(hla_name(base, mixer))
        found = {k: v.shape for k, v in model.state_dict().items()}
        assert {k: v for k, v in found.items() if ".mixer." not in k} == shapes
        assert {k for k in found if k not in shapes} >= {f"blocks.{i}.attn.mixer.tag" for i in range(len(host.blocks))}
        assert model.default_cfg["architecture"] == hla_name(base, mixer)
        assert resolve_data_config({}, model=model) == resolve_data_config({}, model=host)
        for key in ("classifier", "first_conv", "num_classes", "fixed_input_size"):
            assert model.default_cfg[key] == host.default_cfg[key]
        assert model.feature_info == host.feature_info


def test_the_same_seed_gives_the_weights_of_the_base():
    def created(name):
        torch.manual_seed(0)
        return timm.create_model(name, img_size=SIZE, **NARROW)

    host, model = created("vit_tiny_patch16_224"), created("vit_ahla_tiny_patch16_224")
    assert all(torch.equal(model.state_dict()[k], v) for k, v in host.state_dict().items())


@pytest.mark.parametrize("mixer", MIXERS)
def test_options_and_keywords(mixer):
    options = options_of(mixer, depthwise="v", gate=True)
    model = tiny(
        hla_name("vit_small_patch16_224", mixer),
        mixer_options=options,
        keep_softmax=[0],
        drop_path_rate=0.1,
        global_pool="avg",
        init_values=0.1,
        num_classes=0,
    )
    assert [s.mixer_name for s in sites(model)] == [mixer]
    assert model(image()).shape == (2, 32)
    assert model.hla_config == [{"mixer": mixer, "layers": None, "keep_softmax": [0], "options": options}]


def test_entrypoints_are_importable_and_documented():
    create = vision_transformer.vit_hla3_base_patch16_224
    assert pickle.loads(pickle.dumps(create)) is create
    assert "`vit_base_patch16_224` with the mixer `hla3`" in create.__doc__
    assert "vit_hla3_base_patch16_224" in vision_transformer.__all__


def test_importing_again_registers_nothing_twice():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import zoo  # noqa: F401


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"gate": True}, "gate: pass options of the mixer as mixer_options={'gate': ...}"),
        ({"mixer_options": ["gate"]}, "mixer_options is a dict"),
        ({"mixer_options": {"gatee": True}}, "unknown ahla option 'gatee'.*Did you mean 'gate'"),
        ({"keep_softmax": [5]}, "keep_softmax lists block indices"),
        ({"use_naflex": True}, "has no NaFlex form"),
        ({"scriptable": True}, r"torch\.export"),
        ({"patch_drop_rate": 0.5, "mixer_options": {"causal": True}}, "patch_drop_rate > 0 trains on random patches"),
        ({"attn_drop_rate": 0.5}, "attn_drop_rate=0.5"),
    ],
)
def test_bad_keywords(keywords, message):
    with pytest.raises(ValueError, match=message):
        tiny("vit_ahla_tiny_patch16_224", **keywords)
