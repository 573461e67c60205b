"""Converted models are saved and loaded by diffusers itself."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from tests.helpers.tiny_diffusers import CASES, blocks_for, converted, host, inputs, record, run, sites
from zoo.mixers.hla import AHLA
from zoo.mixers.poly import Polynomial
from zoo.models.checkpoint_tags import decode_tag


def same(model, again, name) -> bool:
    return torch.equal(run(again, inputs(name)), run(model, inputs(name)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [{}, {"depthwise": "v", "gate": True, "keep_softmax": [1]}])
def test_save_and_load(name, options, tmp_path):
    model = converted(name, "ahla", **options)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.config == model.config or dict(again.config)["conversions"] == model.config.conversions
    assert not any(t.is_meta for t in [*again.parameters(), *again.buffers()]) and same(model, again, name)


@pytest.mark.parametrize("name", CASES)
def test_shards_and_variants(name, tmp_path):
    model = converted(name, "poly", gate=True, coefficients=(1.0, 0.5, 0.0, 0.0))
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB", variant="bf16")
    assert len(list((tmp_path / "shards").glob("*bf16*.safetensors"))) > 1
    assert same(model, type(model).from_pretrained(tmp_path / "shards", variant="bf16"), name)
    half = type(model).from_pretrained(tmp_path / "shards", variant="bf16", torch_dtype=torch.bfloat16)
    mixer = sites(half)[0].mixer
    assert mixer.gate.weight.dtype == torch.bfloat16 and mixer.tag.dtype == torch.uint8


@pytest.mark.parametrize("name", CASES)
def test_each_layer_comes_back_as_it_was(name, tmp_path):
    model = converted(name, "ahla", keep_softmax=[0], gate=True)
    layers = [row.layer for row in zoo.convert(model, "softmax", layers=[1]).swapped]
    zoo.convert(model, "hla3", layers=[-1], feature_map="relu")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert same(model, again, name)
    if record(name).mixer != "softmax":  # whose softmax is a conversion too
        assert all(again.get_submodule(layer).mixer_name == "softmax" for layer in layers)
    zoo.convert(again, "softmax")
    again.save_pretrained(tmp_path)
    assert same(again, type(model).from_pretrained(tmp_path), name)


def test_the_config_alone_builds_the_mixers():
    model = converted("wan", "ahla", depthwise="v", keep_softmax="every:2")
    again = type(model).from_config(model.config)
    again.load_state_dict(model.state_dict())
    assert same(model, again, "wan") and not again.from_softmax
    assert again.config.conversions == model.config.conversions


def test_weights_of_the_host_and_of_another_mixer():
    model = converted("dit", "ahla")
    model.load_state_dict(host("dit").state_dict())
    assert model.from_softmax
    with pytest.raises(ValueError, match=r"was made with the mixer 'la' in transformer_blocks.0.attn1, but the model"):
        model.load_state_dict(converted("dit", "la").state_dict())


@pytest.mark.parametrize("name", CASES)
def test_a_folder_of_the_host_is_converted_on_loading(name, tmp_path):
    wanted = host(name)
    wanted.save_pretrained(tmp_path)
    cls = type(converted(name, "la"))
    again = cls.from_pretrained(tmp_path, conversions=[{"mixer": "hla2", "options": {"gate": True}}])
    zoo.convert(wanted, "hla2", gate=True)
    assert same(wanted, again, name)
    with pytest.raises(ValueError, match=r"holds a .* without mixers"):
        cls.from_pretrained(tmp_path)
    wanted.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is converted already"):
        cls.from_pretrained(tmp_path, conversions=[{"mixer": "la"}])
    other = type(converted("sana" if name == "dit" else "dit", "la"))
    with pytest.raises(ValueError, match=f"holds a {cls.__name__}, which {other.__name__} cannot load"):
        other.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["dit", "pixart", "sana", "wan"])
@pytest.mark.parametrize(
    ("mixer", "given"),
    [("mhla", {}), ("mhla2", {}), ("multipole", {"select": "near"}), ("multipole", {"branch": "mhla", "k_tile": 2})],
)
def test_blocks_are_saved(name, mixer, given, tmp_path):
    model = converted(name, mixer, **{**given, **blocks_for(name, "mhla")}, lepe=3, keep_softmax=[1])
    blocks = [1, 2, 2] if name == "wan" else [2, 2]
    assert {"lepe": 3, "blocks": blocks}.items() <= model.config.conversions[0]["options"].items()
    model.save_pretrained(tmp_path)
    assert same(model, type(model).from_pretrained(tmp_path), name)
    assert run(model, inputs(name, size=12)).isfinite().all() and not same(model, host(name), name)


@pytest.mark.parametrize(("mixer", "options"), [("mhla", {}), ("multipole", {"branch": "mhla"})])
def test_blocks_for_the_usual_size_of_a_video(mixer, options):
    report = zoo.convert(host("wan"), mixer, **options)
    (shown,) = {row.blocks for row in report.swapped}
    assert shown.endswith("4x5x9 of 21x30x52") and shown in str(report)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize(
    ("mixer", "earlier"),
    [
        ("ahla", {"feature_map": "elu1"}),
        ("poly", {"feature_map": "identity", "normalize": False, "center": "k", "mean_path": True}),
    ],
)
def test_a_folder_from_before_keeps_its_feature_map(mixer, earlier, shards, tmp_path, monkeypatch):
    """Its config.json holds only the options that differed from the defaults of its time, its tags fewer options."""
    kind = {"ahla": AHLA, "poly": Polynomial}[mixer]
    monkeypatch.setattr(kind, "defaults", type(kind.defaults)(feature_map="relu"))
    model = converted("dit", mixer, **earlier)
    model.save_pretrained(tmp_path, **({"max_shard_size": "50KB"} if shards else {}))
    for file in tmp_path.glob("*.safetensors"):
        weights = load_file(file)
        for key in [key for key in weights if key.endswith(".mixer.tag")]:
            tag = decode_tag(weights[key])
            text = json.dumps({"mixer": tag["mixer"], "feature_map": tag["feature_map"]})
            weights[key] = torch.tensor([2 * byte for byte in text.encode("ascii")], dtype=torch.uint8)
        save_file(weights, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["conversions"] = [{"mixer": mixer}]
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = type(model).from_pretrained(tmp_path)
    assert same(model, again, "dit")
    assert again.config.conversions == model.config.conversions
    assert torch.equal(sites(again)[0].mixer.tag, sites(model)[0].mixer.tag)


def test_a_folder_whose_weights_are_of_another_mixer_is_refused(tmp_path):
    converted("dit", "ahla").save_pretrained(tmp_path / "ahla")
    converted("dit", "hla2").save_pretrained(tmp_path / "hla2")
    shutil.copy(tmp_path / "ahla" / "config.json", tmp_path / "hla2" / "config.json")
    with pytest.raises(ValueError, match=r"made with the mixer 'hla2' in transformer_blocks\.0\.attn1"):
        zoo.HLADiTTransformer2DModel.from_pretrained(tmp_path / "hla2")
