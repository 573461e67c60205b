"""What is refused before a run starts, in one sentence each; and the configurations that are shipped."""

import diffusers
import pytest
import torch

from tests.forks import run_fork
from tests.helpers.runs import ROOT
from tests.helpers.tiny_runs import tiny
from zoo import config
from zoo.diffusion.loading import load_transformer
from zoo.diffusion.objectives import create_objective
from zoo.diffusion.schedulers import scheduler_to_save
from zoo.diffusion.settings import ObjectiveSettings
from zoo.mixers import MIXERS, build_mixer
from zoo.train.denoising.run import DiffusionRun
from zoo.train.denoising.settings import DiffusionSettings

CONFIGS = [file for folder in ("dit", "t2i", "video") for file in sorted((ROOT / "configs" / folder).rglob("*.yaml"))]
WITH_RESOLUTION = {"use_additional_conditions": True, "cross_attention_dim": 16, "caption_channels": 8}
PUBLISHED = {"s": (384, 12), "b": (768, 12), "l": (1024, 24), "xl": (1152, 28)}  # arXiv 2212.09748, table 1


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_shipped_configurations_hold(file):
    settings = config.load(DiffusionSettings, file)
    if settings.model.mixer:
        grid = (4, 8, 8) if file.parent.name == "video" else (8, 8)
        layout = {"grid": grid} if MIXERS[settings.model.mixer].defaults.needs_grid else {}
        build_mixer(settings.model.mixer, 48, 3, 16, grid_dims=len(grid), **layout, **settings.model.mixer_options)
    text = file.read_text().replace("\n# ", " ")
    assert "Not run" in text or file.stem.startswith(("digits", "cifar10", "moving_digits", "clips"))
    size = file.stem.split("_")[0]
    if file.parent.name == "imagenet" and not settings.model.checkpoint:
        with torch.device("meta"):
            width = 64 if "512" in file.stem else 32
            model = _built(settings, width)
        assert (model.inner_dim, len(model.transformer_blocks)) == PUBLISHED[size]
        assert model.config.out_channels == 8 and model.config.sample_size == width


def _built(settings, width):
    kwargs = settings.model.kwargs
    sizes = {"in_channels": 4, "out_channels": 8, "sample_size": width, "num_embeds_ada_norm": 1000}
    return diffusers.DiTTransformer2DModel(**sizes, **kwargs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny softmax DiT of 10 classes for 8 x 8 pixels, flow matching."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "norm_num_groups": 4}
    model = diffusers.DiTTransformer2DModel(
        **sizes, in_channels=3, sample_size=8, num_embeds_ada_norm=10, out_channels=3
    )
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"data": {"img_size": 9}}, r"inputs of 9 x 9 are not divisible by the patch size 2"),
        ({"data": {"img_size": None}}, r"data.img_size is empty"),
        ({"objective": {"kind": "dpm"}}, r"unknown objective.kind 'dpm'"),
        ({"model": {"kind": "dti"}}, r"unknown model.kind 'dti'.*Did you mean 'dit'"),
        ({"model": {"kwargs": {"sample_size": 8}}}, r"model.kwargs must not give sample_size"),
        ({"model": {"kwargs": {"num_layers": -1}}}, r"DiTTransformer2DModel with .*'num_layers': -1.* has no blocks"),
        ({"model": {"kwargs": {"patch_size": 0}}}, r"patch_size of DiTTransformer2DModel must be 1 or more, got 0"),
        ({"model": {"kwargs": {"attention_head_dim": 0}}}, r"DiTTransformer2DModel with .*'attention_head_dim': 0"),
        ({"model": {"kwargs": {"deepness": 8}}}, r"diffusers cannot build DiTTransformer2DModel"),
        ({"model": {"kwargs": {"norm_eps": "x"}}}, r"model.kwargs.norm_eps must be float, got 'x'"),
        ({"model": {"kwargs": {"activation_fn": "banana"}}}, r"diffusers cannot build DiTTransformer2DModel"),
        ({"model": {"checkpoint": "nowhere"}}, r"there is no checkpoint nowhere"),
        ({"distill": {"teacher": "source"}}, r"no trained source: the run starts from random weights"),
        ({"distill": {"teacher": "nowhere"}}, r"there is no checkpoint nowhere"),
        ({"optim": {"layer_decay": 0.75}}, r"optim.layer_decay is for image classifiers"),
        (
            {"objective": {"kind": "ddpm"}, "model": {"kind": "pixart", "kwargs": WITH_RESOLUTION}},
            r"model.kind=pixart also reads the resolution",
        ),
        ({"data": {"cond_dropout": 1.5}}, r"data.cond_dropout must be in \[0, 1\]"),
        ({"data": {"batch_size": 2000}}, r"the training set has only 1000 images"),
        ({"schedule": {"warmup_steps": 9}}, "schedule.warmup_steps must be below schedule.steps"),
    ],
)
def test_wrong_settings(tmp_path, monkeypatch, sections, sentence):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # without, retries take most of a minute
    with pytest.raises(ValueError, match=sentence) as caught:
        DiffusionRun(tiny(tmp_path / "run", **sections))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"objective": {"kind": "ddpm"}}, r"returns 3 channels for 3, but the objective needs 6"),
        ({"data": {"img_size": 16}}, r"is a model of inputs 8 wide, but the data is 16 wide"),
        ({"model": {"kwargs": {"num_layers": 2}}}, r"has num_layers=1, model.kwargs has 2"),
        ({"model": {"mixer": "ahhla"}}, r"Did you mean 'ahla'"),
        ({"distill": {"teacher": "source", "attention": 1.0}}, r"the model has none: set model.mixer"),
        ({"lora": {"rank": 2, "targets": ["to_z"]}}, r"lora.targets \['to_z'\] name no linear layer|needs the package"),
    ],
)
def test_checkpoints_that_do_not_fit(saved, tmp_path, sections, sentence):
    sections = config.merge({"model": {"checkpoint": str(saved), "kwargs": {"num_layers": 1}}}, sections)
    with pytest.raises(ValueError, match=sentence):
        DiffusionRun(tiny(tmp_path, **sections))


def test_another_number_of_classes(saved, tmp_path, make_folder):
    images = str(make_folder({"a": 10, "b": 10, "c": 10}))
    data = {"source": "folder", "train": images, "val": images}
    model = {"checkpoint": str(saved), "kwargs": {"num_layers": 1}}
    with pytest.raises(ValueError, match=r"is a model of 10 classes, but the data has 3 classes"):
        DiffusionRun(tiny(tmp_path, data=data, model=model))


def test_a_converted_checkpoint_keeps_its_mixer(saved, tmp_path):
    model = {"checkpoint": str(saved), "kwargs": {"num_layers": 1}, "mixer": "la"}
    DiffusionRun(tiny(tmp_path / "la", model=model, schedule={"steps": 1})).train()
    on = {**model, "checkpoint": str(tmp_path / "la")}
    assert DiffusionRun(tiny(tmp_path / "same", model=on)).model.config.conversions
    with pytest.raises(ValueError, match=r"is converted already, by .*; leave model.mixer empty"):
        DiffusionRun(tiny(tmp_path / "other", model={**on, "mixer": "ahla"}))
    with pytest.raises(ValueError, match=r"has no softmax source: .* is converted already"):
        DiffusionRun(tiny(tmp_path / "taught", model=on, distill={"teacher": "source"}))


def test_a_folder_that_is_no_transformer(saved, tmp_path):
    with pytest.raises(ValueError, match=r"holds no transformer: expected config.json"):
        load_transformer(tmp_path)
    diffusers.FlowMatchEulerDiscreteScheduler().save_pretrained(tmp_path / "x")
    (tmp_path / "x" / "scheduler_config.json").rename(tmp_path / "x" / "config.json")
    with pytest.raises(ValueError, match=r"unknown model class 'FlowMatchEulerDiscreteScheduler'"):
        load_transformer(tmp_path / "x")


def test_the_tool_says_one_sentence():
    status, _, err = run_fork("tools/finetune_dit.py", "data.sorce=digits")
    assert status == 2 and err.strip().splitlines()[-1].startswith("error: unknown configuration key 'data.sorce'")
    status, out, _ = run_fork("tools/finetune_dit.py", "--help")
    assert status == 0 and "objective.kind" in out and "--dry-run" in out
    sizes = "model.kwargs={num_layers: 1, num_attention_heads: 1, attention_head_dim: 8, cross_attention_dim: 8}"
    words = ("model.kind=pixart", "data.source=digits", "data.img_size=8", sizes)
    status, _, err = run_fork("tools/finetune_dit.py", *words)
    assert status == 2 and "is a model of prompts, but the data has 10 classes" in err


def test_the_scheduler_of_the_source_is_saved_if_it_samples_what_is_trained(tmp_path):
    def saved(kind, **own):
        name, config = next(iter(own.items()))
        getattr(diffusers, name)(**config).save_pretrained(tmp_path / "scheduler")
        settings = ObjectiveSettings(kind, shift=5.0)
        return scheduler_to_save(str(tmp_path), create_objective(settings), settings)

    flow = saved("flow", FlowMatchEulerDiscreteScheduler={"shift": 3.0})
    assert flow.config.shift == 3.0
    sana = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    assert type(saved("flow", DPMSolverMultistepScheduler=sana)).__name__ == "DPMSolverMultistepScheduler"
    pixart = {"beta_start": 1e-4, "solver_order": 2}
    assert type(saved("ddpm", DPMSolverMultistepScheduler=pixart)).__name__ == "DPMSolverMultistepScheduler"
    assert type(saved("ddpm", DPMSolverMultistepScheduler=sana)).__name__ == "DDIMScheduler"
    assert type(saved("ddpm", DDIMScheduler={"beta_start": 1e-3})).__name__ == "DDIMScheduler"
    assert saved("ddpm", DDIMScheduler={"beta_start": 1e-3}).config.beta_start == 1e-4
    assert saved("flow", DDIMScheduler={}).config.shift == 5.0
    settings = ObjectiveSettings("flow", shift=5.0)
    assert scheduler_to_save("", create_objective(settings), settings).config.shift == 5.0
