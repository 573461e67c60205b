"""Models converted once, twice or in part are saved by timm's hub format and reload as what they are."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf

import zoo
from tests.helpers.tiny_models import NARROW, NEW_IN_TIMM, SIZE, image, needs_sapiens, sites, stir, tiny
from zoo.models import CONVERTED

BASE, OURS = "vit_tiny_patch16_224", "vit_ahla_tiny_patch16_224"
RECORDS = hasattr(timm.models, "get_model_args")  # the arguments of `create_model` (timm 1.0.31)


def save(model, folder, **host):
    """timm's hub format; for a timm that does not remember the arguments of `create_model`, these are given."""
    arguments = {"img_size": SIZE, **NARROW, **host}
    save_for_hf(model, folder, **({} if RECORDS else {"model_args": {**arguments, **getattr(model, "hla_args", {})}}))
    return json.loads((folder / "config.json").read_text())


def kinds(model) -> list[str]:
    return [getattr(block.attn, "mixer_name", "softmax") for block in model.blocks]


def reload(model, folder, **host):
    """(config, reloaded model), which gives the same output as `model`, bit for bit, and is saved as the same again."""
    stir(model)
    config = save(model, folder, **host)
    again = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert torch.equal(again.eval()(image()), model.eval()(image())) and kinds(again) == kinds(model)
    assert again.state_dict().keys() == model.state_dict().keys()
    twice = save(again, folder / "again", **host)
    assert (twice["architecture"], twice["model_args"]) == (config["architecture"], config["model_args"])
    return config, again


SEQUENCES = [  # first model, conversions, name, arguments that are saved, mixers
    (OURS, [("softmax", {})], BASE, {}, ["softmax"] * 2),
    (BASE, [("ahla", {}), ("softmax", {})], BASE, {}, ["softmax"] * 2),
    (BASE, [("softmax", {})], BASE, {}, ["softmax"] * 2),
    (BASE, [("softmax", {}), ("ahla", {})], OURS, {}, ["ahla"] * 2),
    (OURS, [("la", {})], "vit_la_tiny_patch16_224", {}, ["la"] * 2),
    (BASE, [("ahla", {"gate": True}), ("la", {})], "vit_la_tiny_patch16_224", {}, ["la"] * 2),
    (BASE, [("ahla", {"layers": [0]})], OURS, {"keep_softmax": [1]}, ["ahla", "softmax"]),
    (BASE, [("ahla", {"layers": [0]}), ("ahla", {"layers": [1]})], OURS, {}, ["ahla"] * 2),
    (OURS, [("softmax", {"layers": [0]})], OURS, {"keep_softmax": [0]}, ["softmax", "ahla"]),
    (BASE, [("ahla", {"layers": {"*": "la"}})], "vit_la_tiny_patch16_224", {}, ["la"] * 2),
    (BASE, [("ahla", {"keep_softmax": "every:2"})], OURS, {"keep_softmax": [0]}, ["softmax", "ahla"]),
    (OURS, [("ahla", {"feature_map": "relu"})], OURS, {"mixer_options": {"feature_map": "relu"}}, ["ahla"] * 2),
    (BASE, [("ahla", {"feature_map": "relu"}), ("ahla", {})], OURS, {}, ["ahla"] * 2),
    (BASE, [("ahla", {}), ("la", {"layers": [1], "depthwise": "v"})], CONVERTED, None, ["ahla", "la"]),
    (OURS, [("ahla", {"layers": [0], "mean_path": True, "normalize": False})], CONVERTED, None, ["ahla"] * 2),
    (
        BASE,
        [("mhla", {"lepe": 3})],
        "vit_mhla_tiny_patch16_224",
        {"mixer_options": {"lepe": 3, "blocks": [2, 2]}},
        None,
    ),
    (
        BASE,
        [("mhla2", {"mixing": "fixed", "blocks": [2, 4]}), ("la", {"layers": [0]})],
        CONVERTED,
        None,
        ["la", "mhla2"],
    ),
    (BASE, [("poly", {"coefficients": (1.0, 0.5, 0.0, 0.0)}), ("hla3", {"layers": [0]})], CONVERTED, None, None),
]


@pytest.mark.parametrize(("first", "conversions", "name", "arguments", "mixers"), SEQUENCES)
def test_every_sequence_of_conversions_reloads_exactly(first, conversions, name, arguments, mixers, tmp_path):
    model = tiny(first)
    for mixer, options in conversions:
        zoo.convert(model, mixer, **options)
    config, again = reload(model, tmp_path)
    assert config["architecture"] == name == model.default_cfg["architecture"] == again.default_cfg["architecture"]
    assert mixers is None or kinds(again) == mixers
    found = {k: v for k, v in config["model_args"].items() if k in ("mixer_options", "keep_softmax", "conversions")}
    if arguments is None:
        assert set(found) == {"conversions"}
        return
    options = found.pop("mixer_options", {})  # every one, defaults too
    given = dict(arguments)
    wanted = given.pop("mixer_options", {})
    assert found == given and wanted.items() <= options.items() and bool(options) == (name != BASE)


def test_a_created_model_with_options_that_is_converted_again(tmp_path):
    model = tiny(OURS, mixer_options={"gate": True}, keep_softmax=[1])
    zoo.convert(model, "hla2", layers="blocks.1.attn", post_norm=True)
    config, again = reload(model, tmp_path)
    assert config["architecture"] == CONVERTED and kinds(again) == ["ahla", "hla2"]
    chosen = [(done["options"]["gate"], done["options"]["post_norm"]) for done in again.hla_config]
    assert chosen == [(True, False), (False, True)]
    zoo.convert(again, "softmax")
    config, _ = reload(again, tmp_path / "third")
    assert config["architecture"] == BASE and not {"base", "conversions", "mixer_options"} & set(config["model_args"])


@pytest.mark.parametrize(
    "base",
    [
        "vit_small_patch16_rope_mixed_224",
        "vit_small_patch16_dinov3",
        "eva02_tiny_patch14_224",
        "vit_base_patch16_siglip_224",
        "vit_small_patch16_18x2_224",
        "deit_tiny_distilled_patch16_224",
        pytest.param(NEW_IN_TIMM, marks=needs_sapiens),
    ],
)
@pytest.mark.parametrize(
    "conversions", [[("ahla", {"gate": True})], [("hla2", {"layers": [1]}), ("la", {"layers": [0]})]]
)
def test_bases_without_a_name_of_ours_reload_too(base, conversions, tmp_path):
    host = {"patch_size": 16} if base != NEW_IN_TIMM else {"num_kv_heads": 1}
    model = tiny(base, **host)
    for mixer, options in conversions:
        zoo.convert(model, mixer, **options)
    stir(model)
    config = save(model, tmp_path, **host)
    registered = base.startswith("deit") and len(conversions) == 1
    assert config["architecture"] == ("deit_ahla_tiny_distilled_patch16_224" if registered else CONVERTED)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert torch.equal(again.eval()(image()), model.eval()(image()))
    assert [s.mixer_name for s in sites(again)] == [s.mixer_name for s in sites(model)]
    zoo.convert(again, "softmax")
    assert again.default_cfg["architecture"] == base


def test_blocks_swapped_in_part_reload(tmp_path):
    model = tiny("vit_small_patch16_18x2_224")
    zoo.convert(model, "la", layers="blocks.*.attns.1.attn")
    save(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert len(sites(again)) == 2 and torch.equal(again.eval()(image()), model.eval()(image()))


def create(**keywords):
    return timm.create_model(CONVERTED, **{"img_size": SIZE, **NARROW, **keywords})


def test_the_general_name_takes_the_weights_of_its_base():
    base = "vit_small_patch16_rope_224"
    weights, keywords = tiny(base).state_dict(), {"base": base, "conversions": [{"mixer": "la"}]}
    overlay = {"state_dict": dict(weights), "num_classes": 5}
    model = create(**keywords, pretrained=True, pretrained_cfg_overlay=overlay)
    assert model.from_softmax and all(torch.equal(model.state_dict()[k], v) for k, v in weights.items())
    host, plain = (timm.create_model(name, device="meta", **more) for name, more in [(base, {}), (CONVERTED, keywords)])
    assert {**host.default_cfg, "architecture": CONVERTED} == plain.default_cfg
    features = create(**keywords, features_only=True, out_indices=(0, 1))
    assert features(image())[-1].shape == (2, 32, 4, 4)
    tagged = timm.create_model(
        CONVERTED, base="vit_small_patch16_dinov3.lvd1689m", conversions=model.hla_config, device="meta"
    )
    assert tagged.default_cfg["tag"] == "lvd1689m" and tagged.default_cfg["hf_hub_id"]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({}, 'needs a timm model and its conversions.*base="vit_small_patch16_dinov3"'),
        ({"base": "vit_tiny_patch16_225"}, "not the name of a timm model; did you mean 'vit_tiny_patch16_224'"),
        ({"base": 3}, "base=3 is not the name of a timm model"),
        ({"base": OURS}, "is already converted"),
        ({"base": BASE}, "conversions is empty"),
        ({"base": BASE, "conversions": {"mixer": "la"}}, "conversions is a list of dicts with the keys mixer, layers"),
        ({"base": BASE, "conversions": ["la"]}, "a conversion is a dict with the keys mixer, layers"),
        ({"base": BASE, "conversions": [{"mixer": "la", "layer": [0]}]}, "key of a conversion 'layer'.*'layers'"),
        ({"base": BASE, "conversions": [{"mixer": "la", "options": {"gatee": True}}]}, "Did you mean 'gate'"),
        ({"base": BASE, "conversions": [{"mixer": "la", "options": {"layers": [0]}}]}, "argument of the conversion"),
        ({"base": BASE, "conversions": [{"mixer": "la", "options": {"device": "cpu"}}]}, "device= cannot be set"),
        ({"base": BASE, "conversions": [{"mixer": "la"}], "use_naflex": True}, "has no NaFlex form"),
        ({"base": "swin_tiny_patch4_window7_224", "conversions": [{"mixer": "la"}]}, "limited to windows"),
    ],
)
def test_bad_keywords_of_the_general_name(keywords, message):
    narrow = {} if "swin" in str(keywords.get("base")) else {"img_size": SIZE, **NARROW}
    with pytest.raises(ValueError, match=message):
        timm.create_model(CONVERTED, **narrow, **keywords)


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "missing"])
def test_unreadable_weights_are_one_sentence_with_the_file(ending, damage, tmp_path):
    file = tmp_path / f"base.{ending}"
    weights = tiny(BASE).state_dict()
    save_file(weights, file) if ending == "safetensors" else torch.save(weights, file)
    whole = file.read_bytes()
    file.write_bytes({"truncated": whole[: len(whole) // 2], "empty": b"", "text": b"no weights"}.get(damage, whole))
    if damage == "missing":
        file.unlink()
    for name, extra in [(OURS, {}), (CONVERTED, {"base": BASE, "conversions": [{"mixer": "la"}]})]:
        overlay = {"file": str(file), "num_classes": 5, "custom_load": False}  # older timm has numpy files of the base
        with pytest.raises(ValueError, match=rf"checkpoint {file}") as said:
            timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, img_size=SIZE, **NARROW, **extra)
        assert "\n" not in str(said.value) and ("there is no" in str(said.value)) == (damage == "missing")


def test_an_unreadable_folder_is_one_sentence(tmp_path):
    model = tiny(OURS)
    save(model, tmp_path)
    (file,) = tmp_path.glob("*.bin")
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ValueError, match=f"checkpoint {tmp_path} is truncated, damaged or not one of tensors"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)


def test_blocks_are_those_of_the_size_at_conversion(tmp_path):
    """A saved model of blocks keeps them at another size, and says which checkpoint has others."""
    model = tiny(BASE)
    zoo.convert(model, "mhla")
    save(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=2 * SIZE)
    assert [s.mixer.blocks for s in sites(again)] == [(2, 2)] * 2 == [s.mixer.blocks for s in sites(model)]
    assert again(image(height=2 * SIZE, width=2 * SIZE)).isfinite().all()
    other = tiny(BASE)
    zoo.convert(other, "mhla", blocks=[4, 1])
    with pytest.warns(UserWarning, match=r"blocks=\[2, 2\] \(here \[4, 1\]\)"):
        other.load_state_dict(model.state_dict())


BLOCKS = [("mhla", {}), ("mhla", {"mixing": "distance"}), ("mhla", {"mixing": "fixed", "prior": "local"})]
BRANCH = ("multipole", {"branch": "mhla", "k_tile": 4})


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize(("mixer", "options"), [*BLOCKS, BRANCH])
def test_a_created_model_of_blocks_runs_at_another_size(mixer, options, general, tmp_path):
    """Saved by timm, loaded at twice the size: what the model itself gives there. The blocks that were chosen at the
    first size, or the function of distance, are part of what is saved."""
    step = {"base": BASE, "conversions": [{"mixer": mixer, "options": options}]}
    model = tiny(CONVERTED, **step) if general else tiny(f"vit_{mixer}_tiny_patch16_224", mixer_options=options)
    reload(model, tmp_path)
    large = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=4 * SIZE).eval()
    model.set_input_size(4 * SIZE)
    if options.get("mixing") == "distance":
        assert [s.mixer.blocks for s in sites(large)] == [(4, 4)] * 2
    x = image(height=4 * SIZE, width=4 * SIZE)
    assert torch.equal(large(x), model.eval()(x))


def test_more_blocks_than_tokens_are_refused_at_conversion():
    model = tiny(BASE)
    with pytest.raises(ValueError, match=r"blocks=\[9, 1\] are more than the tokens of the grid"):
        zoo.convert(model, "mhla", blocks=[9, 1])
    assert not sites(model)


@pytest.mark.parametrize("name", ["vit_mhla_tiny_patch16_224", "deit_mhla2_tiny_distilled_patch16_224"])
def test_a_distance_form_at_two_sizes(name):
    """Weights that are a function of distance load at a size with more blocks."""
    options = {"mixer_options": {"mixing": "distance", "per_head": True}}
    small, large = tiny(name, **options), tiny(name, img_size=2 * SIZE, seed=1, **options)
    assert [m.mixer.blocks for m in (*sites(small), *sites(large))] == [(2, 2), (2, 2), (3, 3), (3, 3)]
    huge = tiny(name, img_size=4 * SIZE, **options)
    assert sites(huge)[0].mixer.blocks == (4, 4)
    huge.load_state_dict({k: v for k, v in small.state_dict().items() if "pos_embed" not in k}, strict=False)
    assert huge(image(height=4 * SIZE, width=4 * SIZE)).isfinite().all()
