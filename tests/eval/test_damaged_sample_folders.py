"""Folders of diffusers that are incomplete or damaged are one sentence, for sampling, conversion and training."""

import json
import shutil

import diffusers
import pytest
import torch

from zoo.diffusion.loading import load_transformer, open_model
from zoo.models.diffusers.convert_folder import convert_folder

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "pipeline"
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "norm_num_groups": 4}
    model = diffusers.DiTTransformer2DModel(**sizes, in_channels=4, sample_size=8, num_embeds_ada_norm=10)
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4)
    diffusers.DiTPipeline(model, vae, diffusers.DDIMScheduler()).save_pretrained(folder)
    return folder


def without(name):
    return lambda folder: (folder / name).unlink()


def cut(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:200])


def class_named(name, what):
    def change(folder):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**config, "_class_name": what}))

    return change


def listed(name):
    return lambda folder: (folder / name).write_text("[1, 2]")


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        ("", without(f"transformer/{WEIGHTS}")),
        ("", cut(f"transformer/{WEIGHTS}")),
        ("", cut(f"vae/{WEIGHTS}")),
        ("", class_named("model_index.json", "NoSuchPipeline")),
        ("", class_named("model_index.json", ["DiTPipeline"])),
        ("", listed("model_index.json")),
        ("/transformer", without(f"transformer/{WEIGHTS}")),
        ("/transformer", cut(f"transformer/{WEIGHTS}")),
        ("/transformer", class_named("transformer/config.json", "NoSuchModel")),
        ("/transformer", class_named("transformer/config.json", ["DiTTransformer2DModel"])),
        ("/transformer", listed("transformer/config.json")),
        ("/transformer", cut("transformer/config.json")),
    ],
)
def test_damaged_folders_are_one_sentence(saved, tmp_path, part, damage):
    folder = tmp_path / "pipeline"
    shutil.copytree(saved, folder)
    damage(folder)
    ways = [lambda where: open_model(where), lambda where: convert_folder(where, tmp_path / "out", "la")]
    for way in ways + [load_transformer] * bool(part):
        with pytest.raises(ValueError) as error:
            way(f"{folder}{part}")
        assert "\n" not in str(error.value) and len(str(error.value)) < 700
