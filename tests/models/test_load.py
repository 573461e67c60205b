"""`zoo.load` opens every format that the package writes, and so do the tools."""

import json

import pytest
import timm
import torch
from timm.models import save_for_hf

import zoo
from tests.helpers.tiny_diffusers import CASES, converted, run
from tests.helpers.tiny_models import image, tiny
from tests.helpers.tiny_pipelines import pipeline
from zoo.models.timm.model_files import Recipe, read_recipe, save_weights
from zoo.train.model import start_classifier
from zoo.train.settings import ModelSettings


def saved(folder, model, safe=True, **config):
    save_for_hf(model, folder, model_config=config, safe_serialization=safe)
    return folder


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("vit_tiny_patch16_224", []),
        ("vit_tiny_patch16_224", [{"mixer": "mhla", "lepe": 3}]),
        ("vit_small_patch16_dinov3", [{"mixer": "la"}, {"mixer": "hla2", "keep_softmax": [0]}]),
        ("vit_hla2_tiny_patch16_224", []),
    ],
)
def test_folders_of_timm(tmp_path, name, steps, safe):
    model = tiny(name).eval()
    for step in steps:
        zoo.convert(model, **step)
    again = zoo.load(saved(tmp_path / "hub", model, safe))
    assert not again.training and torch.equal(again(image()), model(image()))
    theirs = timm.create_model(f"local-dir:{tmp_path}/hub", pretrained=True).eval()
    assert torch.equal(theirs(image()), again(image()))


def test_a_folder_of_timm_says_what_its_model_reads(tmp_path):
    model = tiny("vit_tiny_patch16_224")
    recipe = read_recipe(saved(tmp_path, model, label_names=list("abcde")))
    assert (recipe.num_classes, recipe.img_size, recipe.classes) == (5, 64, list("abcde"))
    assert recipe.input["size"] == [64, 64] and recipe.input["mean"] == list(model.pretrained_cfg["mean"])


def test_a_run_starts_from_a_folder_of_timm(tmp_path):
    model = tiny("vit_tiny_patch16_224")
    settings = ModelSettings(checkpoint=str(saved(tmp_path, model)), mixer="la")
    begun, host, recipe = start_classifier(settings, 5)
    assert torch.equal(host.state_dict()["head.weight"], model.head.weight)
    assert torch.equal(begun.head.weight, model.head.weight) and recipe.mixer == "la"


def test_files_of_runs(tmp_path):
    model = tiny("vit_tiny_patch16_224").eval()
    kwargs = {"embed_dim": 32, "num_heads": 2, "depth": 2}
    save_weights(model, Recipe("vit_tiny_patch16_224", kwargs, 64, 5), tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors", str(tmp_path)):
        assert torch.equal(zoo.load(path)(image()), model(image()))


@pytest.mark.parametrize("inside", ["", "transformer", "transformer_ema"])
def test_transformers_of_diffusers(tmp_path, inside):
    model = converted("dit", "la")
    model.save_pretrained(tmp_path / inside)
    again = zoo.load(tmp_path)
    inputs = CASES["dit"].inputs()
    assert type(again) is type(model) and torch.equal(run(again, inputs), run(model.eval(), inputs))


def test_pipelines_of_diffusers(tmp_path):
    pipe, _ = pipeline("dit")
    zoo.convert(pipe, "la")
    pipe.save_pretrained(tmp_path)
    assert type(zoo.load(tmp_path).transformer) is zoo.HLADiTTransformer2DModel


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "20KB"}])
def test_a_variant_of_the_weights_is_found(tmp_path, shards):
    pipe, _ = pipeline("dit")
    zoo.convert(pipe, "la")
    pipe.save_pretrained(tmp_path, variant="fp16", **shards)
    inputs = CASES["dit"].inputs()
    pipe.scheduler.save_pretrained(tmp_path / "other")  # a folder without weights
    for again in (zoo.load(tmp_path).transformer, zoo.load(tmp_path / "transformer")):
        assert torch.equal(run(again, inputs), run(pipe.transformer.eval(), inputs))
    pipe.transformer.proj_out_2.bias.data += 1
    pipe.transformer.save_pretrained(tmp_path / "transformer")  # weights without a variant are preferred
    again = zoo.load(tmp_path / "transformer")
    assert torch.equal(run(again, inputs), run(pipe.transformer, inputs))


def test_several_variants_are_refused(tmp_path):
    for variant in ("fp16", "ema"):
        converted("dit", "la").save_pretrained(tmp_path, variant=variant)
    with pytest.raises(ValueError, match=r"several variants of its weights \(ema, fp16\)"):
        zoo.load(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"architecture": "vit_tiny"}, "unknown timm model 'vit_tiny'"),
        ({"architecture": None}, "save_for_hf"),
        ({"pretrained_cfg": {}}, "save_for_hf"),
        ({"model_args": {"depth": "x"}}, "cannot build"),
    ],
)
def test_damaged_folders_of_timm(tmp_path, damage, message):
    saved(tmp_path, tiny("vit_tiny_patch16_224"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | damage))
    with pytest.raises(ValueError, match=message):
        zoo.load(tmp_path)


def test_a_damaged_pickle_and_an_empty_folder(tmp_path):
    saved(tmp_path / "a", tiny("vit_tiny_patch16_224"), False)
    file = tmp_path / "a" / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ValueError, match="truncated or damaged"):
        zoo.load(tmp_path / "a")
    with pytest.raises(ValueError, match="there is no checkpoint"):
        zoo.load(tmp_path / "none")
