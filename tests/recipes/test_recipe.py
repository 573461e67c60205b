"""Transfer and whole recipes on tiny runs of the digits, an image model and a diffusion transformer."""

import json
import shutil

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from tests.helpers.runs import ROOT, TINY
from tests.helpers.tiny_runs import TINY as DENOISER
from tests.helpers.tiny_runs import tiny as denoiser_run
from zoo import config
from zoo.config import merge
from zoo.mixers import MIXERS, build_mixer
from zoo.recipes.report import summary
from zoo.recipes.settings import from_words
from zoo.recipes.stages import run_recipe
from zoo.train.classification import ClassificationRun
from zoo.train.denoising.run import DiffusionRun
from zoo.train.denoising.settings import DiffusionSettings
from zoo.train.layerwise import ImageTransfer, attention_distances
from zoo.train.loop import TrainingRun
from zoo.train.metrics_log import read_rows
from zoo.train.settings import TrainSettings

IMAGE = merge(  # learns two thirds of the digits in a few seconds
    TINY, {"model": {"kwargs": {"embed_dim": 48}}, "data": {"batch_size": 50, "mean": [0.5] * 3, "std": [0.5] * 3}}
)


@pytest.fixture(scope="module")
def image_source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image")
    more = {"schedule": {"epochs": 20, "warmup_epochs": 1}, "optim": {"lr": 6e-3}, "log": {"every": 50}}
    tree = merge(merge(IMAGE, more), {"run": {"folder": str(folder), "eval_epochs": 20, "checkpoint_epochs": 20}})
    assert ClassificationRun(config.from_tree(TrainSettings, tree)).train()["top1"] > 50
    AcceleratorState._reset_state()
    return folder


@pytest.fixture(scope="module")
def denoiser_source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("denoiser")
    DiffusionRun(denoiser_run(folder, schedule={"steps": 40}, run={"eval_steps": 40, "checkpoint_steps": 40})).train()
    return folder


def stop_at(monkeypatch, step):
    """Make the next run fail before this step, counted from 0."""
    original = TrainingRun._train_step

    def limited(self, batches):
        if self.step == step:
            raise KeyboardInterrupt
        original(self, batches)

    monkeypatch.setattr(TrainingRun, "_train_step", limited)


def transfer(source, folder, **sections):
    more = {"model": {"checkpoint": str(source), "mixer": "poly"}, "distill": {"teacher": str(source)}}
    tree = merge(merge(IMAGE, more), {"run": {"folder": str(folder), "checkpoint_steps": 5}, **sections})
    return ImageTransfer(config.from_tree(TrainSettings, merge(tree, {"optim": {"lr": 3e-3}})))


def test_transfer_brings_every_layer_nearer_and_touches_nothing_else(image_source, tmp_path):
    run = transfer(image_source, tmp_path / "run", schedule={"epochs": 2})
    teacher = run.setup.objective.teacher
    images = next(run.setup.val_images.evaluation(64)).images
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    with torch.no_grad():
        first = attention_distances(run.model.eval(), teacher, lambda m: m(images))
    run.train()
    with torch.no_grad():
        last = attention_distances(run.model.eval(), teacher, lambda m: m(images))
    assert first.keys() == {"blocks.0.attn", "blocks.1.attn"}
    assert all(last[name] < 0.9 * first[name] for name in first), (first, last)
    moved = {k for k, v in run.model.state_dict().items() if not torch.equal(v, before[k])}
    assert moved and all(".attn." in name for name in moved)


def test_a_layer_gets_no_gradient_from_another(image_source, tmp_path):
    run = transfer(image_source, tmp_path)
    images = next(run.setup.val_images.evaluation(8)).images
    for own in (False, True):
        found = attention_distances(run.model, run.setup.objective.teacher, lambda m: m(images), own)
        grads = torch.autograd.grad(
            found["blocks.1.attn"], list(run.model.blocks[0].attn.parameters()), allow_unused=True
        )
        assert all(g is None for g in grads)


def test_an_interrupted_transfer_goes_on_bit_for_bit(image_source, tmp_path, monkeypatch):
    transfer(image_source, tmp_path / "whole").train()
    with monkeypatch.context() as m:
        stop_at(m, 7)
        with pytest.raises(KeyboardInterrupt):
            transfer(image_source, tmp_path / "cut").train()
    tree = {"run": {"resume": True, "folder": str(tmp_path / "cut"), "checkpoint_steps": 5}}
    transfer(image_source, tmp_path / "cut", **tree).train()
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(one[k], two[k]) for k in one)


MORE = ["run.checkpoint_steps=5", "run.precision=bf16"]  # not what accelerate takes of itself


def recipe(source, finetune, out, *words):
    return from_words([f"source={source}", f"finetune={finetune}", f"out={out}", "batch=32", "inputs=64", *words])


def test_a_recipe_of_an_image_model_is_killed_and_goes_on(image_source, tmp_path, monkeypatch):
    changes = {"model": {"name": "", "kwargs": {}, "img_size": None, "checkpoint": str(image_source)}}
    changes |= {"schedule": {"epochs": 2}, "optim": {"lr": 2e-3}, "distill": {"teacher": "source"}}
    file, out = tmp_path / "finetune.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump({**IMAGE, **changes}))
    anchored = "mixer_options={feature_map: identity, normalize: false, center: k, mean_path: true}"
    settings = recipe(image_source, file, out, "mixer=poly", anchored, "transfer=0.5", *MORE)
    assert settings.changes == MORE
    with monkeypatch.context() as m:
        stop_at(m, 12)  # in the transfer of 20 steps
        with pytest.raises(KeyboardInterrupt):
            run_recipe(settings)
    done = {name: (out / f"{name}.json").read_bytes() for name in ("inspect", "convert", "calibrate")}
    assert not (out / "transfer.json").exists()
    found = run_recipe(settings)
    assert all((out / f"{name}.json").read_bytes() == content for name, content in done.items())
    assert read_rows(out / "transfer" / "metrics.jsonl")[-1]["step"] == 20
    value = {row["model"]: row["value"] for row in found["evaluate"]["rows"]}
    assert value.keys() == {"source", "converted", "calibrated", "transfer", "finetune", "control", "floor"}
    assert value["calibrated"] > value["converted"] + 5  # no training in between
    assert value["finetune"] > value["floor"]
    assert f"| distance at step {found['transfer']['steps'][0]} |" in (out / "transfer.md").read_text()
    assert found["transfer"]["length"] == 1 and found["finetune"]["result"]["epoch"] == 1
    by_hand = (value["finetune"] - value["floor"]) / (value["control"] - value["floor"])
    assert found["evaluate"]["recovery"] == pytest.approx(by_hand)
    for name in ("calibrate", "transfer", "evaluate"):
        assert (out / f"{name}.md").stat().st_size > 100 and (out / f"{name}.png").stat().st_size > 1000
    assert len((out / "pareto.csv").read_text().splitlines()) == 1 + len(found["calibrate"]["choices"])
    assert all(text in (out / "report.md").read_text() for text in ("Recovery", "## calibrate", "transferred"))
    lines = summary(found).splitlines()
    assert f"fine-tuned: top-1 accuracy (%) {value['finetune']:.4g}" in lines
    assert lines[-1] == f"recovery: {by_hand:.3f}"
    with pytest.raises(ValueError, match=r"they differ in mixer"):
        run_recipe(recipe(image_source, file, out, "mixer=la", "transfer=0.5", *MORE))


def test_a_recipe_anneals_in_the_fine_tuning_alone(image_source, tmp_path):
    """The transfer wants the layers as they are, and the control has none of higher order."""
    changes = {"model": {"name": "", "kwargs": {}, "img_size": None, "checkpoint": str(image_source)}}
    file, out = tmp_path / "finetune.yaml", tmp_path / "out"
    changes |= {"data": IMAGE["data"] | {"batch_size": 500}, "schedule": {"epochs": 2}, "optim": {"anneal": 0.5}}
    file.write_text(yaml.safe_dump({**IMAGE, **changes}))
    found = run_recipe(recipe(image_source, file, out, "mixer=ahla", "transfer=0.5", "stages=[calibrate,transfer]"))
    assert found.keys() == {"calibrate", "transfer"}
    found = run_recipe(recipe(image_source, file, out, "mixer=ahla", "transfer=0.5", "stages=[finetune,controls]"))
    runs = ("transfer", "finetune", "control", "floor")
    read = {name: yaml.safe_load((out / name / "config.yaml").read_text()) for name in runs}
    assert [read[name]["optim"]["anneal"] for name in runs] == [0.0, 0.5, 0.0, 0.5]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="models and batches share the accelerator: none here")
@pytest.mark.xfail(reason="open: on an H200 calibration gained 4.4 points, not 5", strict=False)
def test_a_recipe_runs_where_the_accelerator_is(image_source, tmp_path):
    changes = {"model": {"name": "", "kwargs": {}, "img_size": None}, "schedule": {"epochs": 2}, "optim": {"lr": 2e-3}}
    file = tmp_path / "finetune.yaml"
    file.write_text(yaml.safe_dump({**IMAGE, **changes}))
    found = run_recipe(recipe(image_source, file, tmp_path / "out", "mixer=taylor2", "transfer=0.5", *MORE))
    value = {row["model"]: row["value"] for row in found["evaluate"]["rows"]}
    assert value["calibrated"] > value["converted"] + 5 and value["finetune"] > value["floor"]


def test_a_recipe_of_a_denoiser_keeps_the_most_sensitive_block(denoiser_source, tmp_path):
    file = tmp_path / "finetune.yaml"
    file.write_text(yaml.safe_dump({**DENOISER, "model": {"checkpoint": str(denoiser_source)}}))
    words = ["mixer=taylor2", "mixer_options={width: 4}", "keep_softmax=auto:1", "sample.every=0", "transfer=0.5"]
    found = run_recipe(recipe(denoiser_source, file, tmp_path / "out", *words))
    alone = {row["layer"]: row["distance"] for row in found["calibrate"]["rows"]}
    worst = max(alone, key=alone.get)
    assert found["calibrate"]["keep_softmax"] == [int(worst.split(".")[1])]
    assert [row["layer"] for row in found["transfer"]["rows"]] == [name for name in alone if name != worst]
    saved = json.loads((tmp_path / "out" / "finetune" / "transformer" / "config.json").read_text())
    assert saved["conversions"][0]["mixer"] == "taylor2" and worst not in saved["conversions"][0]["layers"]
    value = {row["model"]: row["value"] for row in found["evaluate"]["rows"]}
    assert value.keys() >= {"source", "calibrated", "finetune", "control", "floor"}
    assert all(0 < v < 10 for v in value.values())


def test_a_recipe_suggests_densities(denoiser_source, tmp_path):
    """For adaptive multipole, with the mean that was measured; the more sensitive layer has more."""
    file, out = tmp_path / "finetune.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump({**DENOISER, "model": {"checkpoint": str(denoiser_source)}}))
    words = ["mixer=multipole", "mixer_options={density: 0.3, q_tile: 4, k_tile: 2}", "stages=[calibrate]"]
    found = run_recipe(recipe(denoiser_source, file, out, *words))["calibrate"]
    first, second = found["density"]
    assert first + second == pytest.approx(0.6, abs=1e-3)
    assert (first > second) == (found["rows"][0]["distance"] > found["rows"][1]["distance"])
    assert f"with the mean of these: {found['density']}" in (out / "report.md").read_text()


def test_a_recipe_of_a_denoiser_with_multipole_is_killed_and_goes_on(denoiser_source, tmp_path, monkeypatch):
    file, out = tmp_path / "finetune.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump({**DENOISER, "model": {"checkpoint": str(denoiser_source)}}))
    words = ["mixer=multipole", "mixer_options={blocks: [2, 2], radius: 1}", "sample.every=0", "transfer=0.34"]
    settings = recipe(denoiser_source, file, out, *words)
    with monkeypatch.context() as m:
        stop_at(m, 3)  # of 4 end to end, after the transfer of 2
        with pytest.raises(KeyboardInterrupt):
            run_recipe(settings)
    done = {name: (out / f"{name}.json").read_bytes() for name in ("inspect", "convert", "calibrate", "transfer")}
    assert not (out / "finetune.json").exists()
    found = run_recipe(settings)
    assert all((out / f"{name}.json").read_bytes() == content for name, content in done.items())
    sites = found["inspect"]["rows"]
    assert [(row["tokens"], row["heads"], row["after"]) for row in sites] == [(16, 2, "multipole")] * 2
    assert min(row["r2"] for row in found["calibrate"]["rows"]) > 0.9  # near softmax with nothing trained
    assert found["transfer"]["length"] == 2 and found["finetune"]["result"]["step"] == 4
    value = {row["model"]: row["value"] for row in found["evaluate"]["rows"]}
    assert value.keys() == {"source", "converted", "calibrated", "transfer", "finetune", "control", "floor"}
    assert value["calibrated"] == pytest.approx(value["source"], rel=5e-3)
    by_hand = (value["finetune"] - value["floor"]) / (value["control"] - value["floor"])
    assert found["evaluate"]["recovery"] == pytest.approx(by_hand)
    assert found["evaluate"]["forward_ms"].keys() == {"source", "finetune"}
    assert all((out / f"{name}.png").stat().st_size > 1000 for name in ("calibrate", "transfer", "evaluate"))
    assert "## evaluate" in (out / "report.md").read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["finetune=x.yaml"], r"missing required option source=RUN_FOLDER"),
        (["source=owner/nowhere"], r"missing required option finetune"),
        (["source=runs/nowhere", "finetune=x.yaml"], r"there is no run runs/nowhere: train the source first"),
        (["source=nowhere", "finetune=x.yaml"], r"the source nowhere is neither a folder nor a model"),
        (["stages=[calibrat]"], r"Did you mean 'calibrate'"),
        (["keep_softmax=auto:two"], r"auto:<n> needs a number"),
        (["transfer=1.5"], r"transfer must be in \[0, 1\)"),
        (["mixr=la"], r"Did you mean 'mixer'"),
        (["distill.teacher="], r"distill.teacher cannot be changed in a recipe, whose key source sets it"),
    ],
)
def test_recipes_that_cannot_be_run_say_why(words, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        run_recipe(from_words([*words, f"out={tmp_path}"]))


@pytest.mark.parametrize(
    ("keep", "sentence"),
    [("auto:2", r"has 2 blocks with attention; allowed: auto:0 to auto:1"), ("[9]", r"block indices from -2 to 1")],
)
def test_too_many_softmax_blocks_are_refused_before_data_is_read(image_source, tmp_path, keep, sentence):
    file, out = tmp_path / "finetune.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(merge(IMAGE, {"data": {"source": "folder", "train": f"{tmp_path}/none"}})))
    with pytest.raises(ValueError, match=sentence):
        run_recipe(recipe(image_source, file, out, "mixer=la", f"keep_softmax={keep}"))
    assert not out.exists()


@pytest.mark.parametrize(
    ("inside", "sentence"),
    [("", "is the source"), ("run", "holds a run"), ("converted", "exists but .*recipe.yaml does not")],
)
def test_a_folder_with_other_files_is_not_overwritten(image_source, tmp_path, inside, sentence):
    file, out = tmp_path / "finetune.yaml", tmp_path / inside
    file.write_text(yaml.safe_dump(IMAGE))
    if inside == "run":
        shutil.copytree(image_source, out)
    elif inside:
        (tmp_path / inside).mkdir()
    out = {"": image_source, "run": out, "converted": tmp_path}[inside]
    with pytest.raises(ValueError, match=sentence):
        run_recipe(recipe(image_source, file, out, "mixer=la"))
    assert not (out / "recipe.yaml").exists()


RECIPES = sorted([*(ROOT / "configs").glob("recipes/*.yaml"), *(ROOT / "configs").glob("experiments/*_convert.yaml")])


@pytest.mark.parametrize("file", RECIPES, ids=lambda f: f.stem)
def test_shipped_recipes_are_valid(file):
    found = from_words([str(file)])
    schema = DiffusionSettings if "dit" in file.stem else TrainSettings
    config.load(schema, ROOT / found.finetune, found.changes)
    layout = {"grid": (16, 16)} if MIXERS[found.mixer].defaults.needs_grid else {}
    assert build_mixer(found.mixer, 128, 2, 64, gains=True, **layout, **found.mixer_options).gains is not None


def test_stages_have_an_order(image_source, tmp_path):
    file = tmp_path / "finetune.yaml"
    file.write_text(yaml.safe_dump(IMAGE))
    with pytest.raises(ValueError, match=r"the stage calibrate comes first"):
        run_recipe(recipe(image_source, file, tmp_path / "out", "stages=[transfer]"))
