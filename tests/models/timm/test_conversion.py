"""`zoo.convert` on timm models: converted layers, weights, reports and errors."""

import copy
import itertools
import json

import numpy as np
import pytest
import timm
import torch

import zoo
from tests.helpers.mixers import options_of
from tests.helpers.tiny_models import MIXERS, NEW_IN_TIMM, image, needs_sapiens, sites, stir, tiny
from zoo.mixers import MIXERS as CLASSES
from zoo.mixers import LayerSpec
from zoo.models.convert import Report


def names_of(model) -> list[str]:
    return [block.attn.mixer_name if hasattr(block.attn, "mixer_name") else "host" for block in model.blocks]


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "vit_small_patch16_rope_mixed_224", "vit_small_patch16_dinov3"]
)
def test_every_weight_is_inherited_by_identity(name, mixer):
    model = tiny(name)
    before = dict(model.named_parameters())
    if not CLASSES[mixer].takes_rotations and getattr(model, "rope", None) is not None:
        with pytest.raises(ValueError, match="rotary embedding"):
            zoo.convert(model, mixer)
        return
    report = zoo.convert(model, mixer, **options_of(mixer, post_norm=True, gate=True, lepe=3))
    after = dict(model.named_parameters())
    assert all(after[n] is p for n, p in before.items())
    new = {n: p for n, p in after.items() if n not in before}
    assert new and all(".mixer." in n for n in new)
    assert report.added == sum(p.numel() for p in new.values())
    y = model(image())
    y.square().sum().backward()
    assert y.isfinite().all() and all(p.grad is not None for n, p in after.items() if "mask" not in n)


def of_bfloat16(model) -> list[float]:
    """Return relative errors of the output and of the gradients of host and mixer weights in a step with bfloat16
    weights without autocast, against float32."""
    exact, found = (one_step(model.bfloat16().to(dtype), dtype) for dtype in (torch.float32, torch.bfloat16))
    return [float((f - e).norm() / e.norm()) if len(e) else 0.0 for f, e in zip(found, exact, strict=True)]


def one_step(model, dtype) -> list[torch.Tensor]:
    model.zero_grad()
    y = model(image().bfloat16().to(dtype))
    (y.float() * torch.randn(y.shape, generator=torch.Generator().manual_seed(3))).mean().backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    assert all(g.dtype == dtype for g in grads.values())
    parts = [[g.float().flatten() for n, g in grads.items() if (".mixer." in n) == new] for new in (False, True)]
    return [y.detach().float().flatten(), *(torch.cat(part) if part else torch.empty(0) for part in parts)]


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_training_step_in_bfloat16_weights(mixer):
    """Gradients of coefficients, gains and norms are as accurate as those in the host. A power p multiplies relative
    errors of q and k by p."""
    host_errors = of_bfloat16(stirred())
    limits = [host_errors[0], host_errors[1], host_errors[1]]
    defaults = CLASSES[mixer].defaults
    feature_map = getattr(defaults, "feature_map", "silu")
    powers = {"elu1": 2.0, "power": defaults.exponent} if feature_map == "power" else {feature_map: 2.0}
    for feature_map, factor in powers.items():
        model = stirred()
        learned = {"depthwise": "v", "gate": True, "post_norm": True, "gains": True, "feature_map": feature_map}
        zoo.convert(model, mixer, **options_of(mixer, **learned))
        stir(model)
        found = of_bfloat16(model)
        assert all(x <= factor * limit for x, limit in zip(found, limits, strict=True)), (feature_map, found, limits)


def stirred():
    """A host whose output depends on its attention."""
    model = tiny("vit_tiny_patch16_224", depth=1)
    with torch.no_grad():
        for block in model.blocks:
            for layer in (block.attn.qkv, block.attn.proj):
                layer.weight.normal_(std=layer.in_features**-0.5)
    return model


@pytest.mark.parametrize("feature_map", ["relu", "softmax", "softmax_pair", "hedgehog", "power"])
@pytest.mark.parametrize("name", ["vit_small_patch16_rope_224", pytest.param(NEW_IN_TIMM, marks=needs_sapiens)])
def test_feature_maps_under_rotation(name, feature_map):
    extra = {"num_kv_heads": 1} if "sapiens" in name else {}
    model = tiny(name, **extra)
    zoo.convert(model, "ahla", feature_map=feature_map)
    assert model(image()).isfinite().all()


@needs_sapiens
@pytest.mark.parametrize("mixer", [name for name in MIXERS if CLASSES[name].takes_rotations])  # the model is rotary
def test_grouped_queries(mixer):
    model = tiny(NEW_IN_TIMM, num_kv_heads=2, num_heads=4)
    zoo.convert(model, mixer, **options_of(mixer, depthwise="qkv", gate=True, post_norm=True))
    stir(model)
    assert sites(model)[0].mixer.depthwise["k"].weight.shape[0] == 16
    assert model(image()).isfinite().all()


def test_rotation_makes_a_linear_mixer_see_positions():
    """Swapping two patches of a RoPE model without absolute positions changes the others' output, as in the host."""
    for mixer in ("softmax", "la", "ahla"):
        model = tiny("vit_small_patch16_rope_224").eval()
        zoo.convert(model, mixer)
        site = sites(model)[0]
        x = torch.randn(1, 17, 32)
        swapped = x.clone()
        swapped[:, [3, 9]] = x[:, [9, 3]]
        rope = model.rope.get_embed()
        assert torch.allclose(site(x)[:, 0], site(swapped)[:, 0], atol=1e-6)
        assert not torch.allclose(site(x, rope=rope)[:, 5], site(swapped, rope=rope)[:, 5], atol=1e-6)


def test_the_report_says_what_happened(capsys):
    model = tiny("vit_base_patch16_siglip_224", depth=4)
    report = zoo.convert(model, "ahla", keep_softmax=[0, -1], gate=True)
    assert isinstance(report, Report) and capsys.readouterr().out.strip() == str(report)
    assert [row.new for row in report.rows[:4]] == ["softmax", "ahla", "ahla", "softmax"]
    assert [row.layer for row in report.swapped] == ["blocks.1.attn", "blocks.2.attn"]
    assert report.skipped[0].reason == "kept by keep_softmax"
    assert zoo.convert(model, "la", keep_softmax=[1]).skipped[0].reason == "kept as ahla by keep_softmax"
    assert "pooling attention" in report.skipped[-1].reason and report.skipped[-1].layer == "attn_pool"
    assert report.added == 2 * (32 * 32 + 32 + 2 * 2)  # gates, and exponents of the two heads of q and k
    assert report.rows[1].kept == 4 * 32 * 32 + 4 * 32
    assert "2 of 5 attention layers swapped" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["rows"][1]["new"] == "ahla"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"layers": [0, -1]}, ["ahla", "host", "host", "ahla"]),
        ({"layers": "blocks.[12].attn"}, ["host", "ahla", "ahla", "host"]),
        ({"layers": {"blocks.0.*": "la", "blocks.[0-2].*": "hla2"}}, ["la", "hla2", "hla2", "host"]),
        ({"layers": {"blocks.0.attn": "softmax", "*": "hla3"}}, ["softmax", "hla3", "hla3", "hla3"]),
        ({"keep_softmax": [1]}, ["ahla", "host", "ahla", "ahla"]),
        ({"keep_softmax": "every:3"}, ["host", "ahla", "ahla", "host"]),
        ({"keep_softmax": "blocks.[0-2].*"}, ["host", "host", "host", "ahla"]),
        ({"layers": range(3), "keep_softmax": (1,)}, ["ahla", "host", "ahla", "host"]),
        ({"layers": [0, 1], "keep_softmax": [0]}, ["host", "ahla", "host", "host"]),
    ],
)
def test_layers_and_keep_softmax(arguments, expected):
    model = tiny("vit_tiny_patch16_224", depth=4)
    zoo.convert(model, "ahla", **arguments)
    assert names_of(model) == expected
    assert model(image()).isfinite().all()


def test_blocks_with_two_attentions_count_as_one_index():
    model = tiny("vit_small_patch16_18x2_224")
    assert len(zoo.convert(model, "la", layers=[1]).swapped) == 2


def test_conversions_are_recorded_and_can_be_repeated():
    model = tiny("vit_tiny_patch16_224")
    zoo.convert(model, "hla2", keep_softmax=[0], gate=True)
    report = zoo.convert(model, "ahla", layers=[1], feature_map="relu")
    assert [(row.old, row.new) for row in report.rows] == [("softmax", "softmax"), ("hla2", "ahla")]
    again = tiny("vit_tiny_patch16_224")
    for done in json.loads(json.dumps(model.hla_config)):
        zoo.convert(again, done["mixer"], layers=done["layers"], keep_softmax=done["keep_softmax"], **done["options"])
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(image()), model(image()))


def test_training_mode_device_and_type_are_those_of_the_host():
    model = tiny("vit_tiny_patch16_224").double().eval()
    zoo.convert(model, "ahla", depthwise="v", gate=True)
    assert all(p.dtype == torch.float64 for p in model.parameters())
    assert not any(m.training for m in model.modules())
    meta = timm.create_model("vit_tiny_patch16_224", device="meta")
    zoo.convert(meta, "poly")
    assert all(t.is_meta for t in [*meta.parameters(), *meta.buffers()])


BAD = [
    ({"mixer": "hlaa2"}, "unknown mixer 'hlaa2'.*Did you mean 'hla2'"),
    ({"mixer": "ahla", "feature_mp": "relu"}, "unknown ahla option 'feature_mp'.*Did you mean 'feature_map'"),
    ({"mixer": "ahla", "feature_map": "rel"}, "unknown feature map 'rel'.*Did you mean 'relu'"),
    ({"mixer": "ahla", "keep_softmx": [0]}, "unknown ahla option 'keep_softmx'.*Did you mean 'keep_softmax'"),
    ({"mixer": "softmax", "gate": True}, "unknown softmax option 'gate'"),
    ({"mixer": "ahla", "layers": [7]}, "layers lists block indices from -2 to 1, got 7"),
    ({"mixer": "ahla", "layers": "block.0"}, "matches none of the attention layers blocks.0.attn ... blocks.1.attn"),
    ({"mixer": "ahla", "layers": {"*": "hla4"}}, "unknown mixer 'hla4'"),
    ({"mixer": "ahla", "keep_softmax": [True]}, "keep_softmax lists block indices"),
    ({"mixer": "ahla", "keep_softmax": "every:1"}, "n of at least 2"),
    ({"mixer": "ahla", "keep_softmax": "all"}, "keep_softmax='all' matches none of the attention layers"),
    ({"mixer": "ahla", "keep_softmax": 0}, "keep_softmax is a list of block indices.*got 0"),
    ({"mixer": "ahla", "keep_softmax": {"*": "la"}}, "keep_softmax is a list of block indices"),
    ({"mixer": "ahla", "keep_softmax": [0.0]}, "keep_softmax lists block indices from -2 to 1, got 0.0"),
    ({"mixer": "ahla", "layers": 1}, "layers is a list of block indices, a pattern of module names or.*got 1"),
    ({"mixer": "ahla", "layers": {"*": "la", "blocks.0.*": "hla2"}}, r"pattern 'blocks.0.\*' matches no layer"),
    ({"mixer": "ahla", "layers": {0: "la"}}, "layers=0 matches none"),
    ({"mixer": ["ahla"]}, "unknown mixer"),
    ({"mixer": "hlaa2", "layers": {"*": "la"}}, "unknown mixer 'hlaa2'"),
    *[
        ({"mixer": mixer, name: 1}, f"{name}= cannot be set: mixers take it from the model")
        for mixer, name in itertools.product(["ahla", "softmax"], LayerSpec._fields)
    ],
    ({"mixer": "la", "ridge": 0.1}, "ridge is defined for"),
    ({"mixer": "ahla", "layers": {"blocks.0.*": "hla2", "*": "la"}, "ridge": 0.1}, "ridge is defined for"),
    ({"mixer": "ahla", "ridge": "much"}, "ridge must be a number"),
    ({"mixer": "ahla", "keep_softmax": [0, 1]}, "nothing to swap in (HLA)?VisionTransformer: 2 attention layers"),
    ({"mixer": "ahla", "layers": []}, "nothing to swap"),
    ({"mixer": "ahla", "depthwise": "v", "grid_dims": 3}, "grid_dims=3 is for video"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_sentence_and_changes_nothing(arguments, message):
    model = tiny("vit_tiny_patch16_224")
    before, keys, classes = str(model), list(model.state_dict()), [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=message):
        zoo.convert(model, **arguments)
    assert str(model) == before and list(model.state_dict()) == keys and not hasattr(model, "hla_config")
    assert [type(m) for m in model.modules()] == classes


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_changes_nothing_in_a_converted_model(arguments, message):
    model = tiny("vit_ahla_tiny_patch16_224", keep_softmax=[1], mixer_options={"gate": True})
    before, done, wanted = dict(model.state_dict()), copy.deepcopy(model.hla_config), model(image())
    parts, cfg = [id(m) for m in model.modules()], dict(model.pretrained_cfg)
    with pytest.raises(ValueError, match=message):
        zoo.convert(model, **arguments)
    assert [id(m) for m in model.modules()] == parts and model.hla_config == done and model.pretrained_cfg == cfg
    assert list(model.state_dict()) == list(before) and torch.equal(model(image()), wanted)


def test_heads_too_wide_for_the_kernels_change_nothing():
    model = tiny("vit_tiny_patch16_224", embed_dim=320, num_heads=1)
    with pytest.raises(ValueError, match="at most"):
        zoo.convert(model, "ahla")
    assert not hasattr(model, "hla_config") and type(model.blocks[0].attn).__name__ == "Attention"


@pytest.mark.parametrize("thing", [None, "vit_tiny_patch16_224", 3])
def test_only_models_are_converted(thing):
    with pytest.raises(ValueError, match=r"convert takes a model, an nn\.Module such as timm\.create_model makes, got"):
        zoo.convert(thing, "la")


def test_the_record_is_a_copy_and_plain():
    layers, options = {"blocks.0.*": "ahla"}, {"coefficients": [1.0, 0.0, 0.0, 0.5]}
    model = tiny("vit_tiny_patch16_224", depth=4)
    zoo.convert(model, "ahla", layers=layers)
    zoo.convert(model, "la", layers=range(1, 3))
    zoo.convert(model, "poly", layers=np.array([3]), **options)
    layers["*"] = "la"
    options["coefficients"][0] = 7.0
    assert json.loads(json.dumps(model.hla_config)) == model.hla_config
    assert [done["layers"] for done in model.hla_config] == [{"blocks.0.*": "ahla"}, [1, 2], [3]]
    assert model.hla_config[-1]["options"] == {"coefficients": [1.0, 0.0, 0.0, 0.5]}
    assert names_of(model) == ["ahla", "la", "la", "poly"]


def test_attention_dropout_is_refused():
    with pytest.raises(ValueError, match=r"attn_drop_rate=0.1 drops entries of the attention matrix"):
        zoo.convert(tiny("vit_tiny_patch16_224", attn_drop_rate=0.1), "ahla")


REFUSED = {
    "swin_tiny_patch4_window7_224": "swin_transformer'.*limited to windows",
    "swinv2_tiny_window8_256": "swin_transformer_v2'.*limited to windows",
    "davit_tiny": "davit'.*limited to windows",
    "maxvit_tiny_tf_224": "maxxvit'.*limited to windows",
    "coatnet_nano_rw_224": "maxxvit'.*position bias",
    "hiera_tiny_224": "hiera'.*not in raster order",
    "mvitv2_tiny": "mvitv2'.*pools keys",
    "pvt_v2_b0": "pvt_v2'.*pools keys.*49 tokens",
    "xcit_nano_12_p16_224": "xcit'.*already linear",
    "coat_tiny": "coat'.*already linear",
    "beit_base_patch16_224": "beit'.*position bias",
    "levit_128s": "levit'.*position bias",
    "visformer_tiny": "visformer'.*by convolutions.*take a caformer",
    "vit_relpos_small_patch16_224": "vision_transformer_relpos'.*position bias",
    "samvit_base_patch16": "vision_transformer_sam'.*position bias",
    "cait_xxs24_224": "cait'.*another form",
    "volo_d1_224": "volo'.*another form",
    "vit_pwee_patch16_reg1_gap_256": "blocks of type ParallelScalingBlock.*no attention module to swap",
    "resnet18": "resnet'.*not a known vision transformer.*Supported: VisionTransformer",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_families_say_why(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(ValueError, match=REFUSED[name]):
        zoo.convert(model, "la")


def test_other_attention_in_a_known_family_is_refused():
    with pytest.raises(ValueError, match="cannot convert attention of type DiffAttention"):
        zoo.convert(tiny("vit_dlittle_patch16_reg1_gap_256"), "la")


def test_wrapped_models_are_named():
    wrapper = timm.create_model("vit_tiny_patch16_224", features_only=True, img_size=64)
    with pytest.raises(ValueError, match="pass its submodule 'model'"):
        zoo.convert(wrapper, "la")


def test_a_mask_needs_softmax():
    model = tiny("vit_tiny_patch16_224")
    zoo.convert(model, "ahla")
    with pytest.raises(ValueError, match="cannot honour an attention mask"):
        model.forward_features(image(), attn_mask=torch.ones(17, 17, dtype=torch.bool))
    with pytest.raises(ValueError, match="causal"):
        model.forward_features(image(), is_causal=True)


def test_reset_restores_host_and_mixer():
    model = tiny("vit_tiny_patch16_224")
    zoo.convert(model, "ahla", gate=True, depthwise="v")
    fresh = copy.deepcopy(model)
    model.init_weights()
    for site in sites(model):
        assert all((p == 0).all() for p in site.mixer.parameters())
        assert torch.equal(site.mixer.tag, sites(fresh)[0].mixer.tag)
