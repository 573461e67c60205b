"""The commands of README.md from a DiT of diffusers to its score, with a tiny random pipeline in place of the hub's."""

import convert
import diffusers
import evaluate_fid
import extract_latents
import finetune_dit
import numpy as np
import pytest
import sample
import torch
import train_vit
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel

import zoo


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """A DiT that learned variances, for latents of 8 x 8, and the VAE of images of 16 x 16, in files as old as those of
    the hub: the class of the transformer has another name there, the weights are no safetensors."""
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "norm_num_groups": 4}
    dit = DiTTransformer2DModel(**sizes, in_channels=4, out_channels=8, sample_size=8, num_embeds_ada_norm=3)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    vae = AutoencoderKL(block_out_channels=[8, 8], norm_num_groups=4, latent_channels=4, **blocks)
    folder = tmp_path_factory.mktemp("hub") / "dit"
    DiTPipeline(dit, vae, DDIMScheduler(clip_sample=False)).save_pretrained(folder, safe_serialization=False)
    for file in (folder / "model_index.json", folder / "transformer" / "config.json"):
        text = file.read_text().replace("DiTTransformer2DModel", "Transformer2DModel")
        file.write_text(text.replace('"activation_fn"', '"use_linear_projection": false,\n  "activation_fn"'))
    return folder


def test_every_command(pipeline, make_folder, tmp_path, monkeypatch):
    images = make_folder({"a": 30, "b": 30, "c": 30}, size=16)
    monkeypatch.chdir(tmp_path)
    report = convert.main([f"diffusers={pipeline}", "model.mixer=ahla", "out=zero_shot"])
    assert len(report["rows"]) == 2
    loaded = diffusers.DiffusionPipeline.from_pretrained("zero_shot")
    assert isinstance(loaded.transformer, zoo.HLADiTTransformer2DModel)
    shared = [f"images.where={images}", f"encode.vae={pipeline}", "images.img_size=16", "images.workers=0"]
    extract_latents.main([*shared, "encode.flip=true", "out=latents/train"])
    extract_latents.main([*shared, "out=latents/val"])
    data = ["data.source=latents", "data.train=latents/train", "data.val=latents/val", "data.batch_size=10"]
    short = ["schedule.steps=2", "sample.count=3", "sample.steps=2", "optim.ema=0.5", "run.folder=runs/ahla"]
    recipe = [f"model.checkpoint={pipeline}", "model.mixer=ahla", "model.mixer_options={depthwise: v}"]
    words = [*data, *short, *recipe, "objective.kind=ddpm", "distill.teacher=source"]
    assert finetune_dit.main([*words, "--dry-run"])["step"] == 1
    assert finetune_dit.main(words)["step"] == 2
    ddpm = "sample.scheduler_options={variance_type: learned_range, clip_sample: false}"
    options = ["sample.count=30", "sample.scheduler=DDPMScheduler", ddpm, "sample.steps=3", "sample.guidance=1.5"]
    options += ["sample.guidance_channels=3", "sample.batch_size=30"]
    sample.main([*options, f"sample.model={pipeline}", "out=softmax.npz"])
    sample.main([*options, "sample.model=runs/ahla/transformer_ema", f"sample.base={pipeline}", "out=ahla.npz"])
    size = ["model.name=vit_tiny_patch16_224", "model.img_size=16", "run.folder=runs/features", "schedule.epochs=1"]
    size += [
        "model.kwargs={patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2}",
        "data.workers=0",
        "augment.crop=none",
    ]
    train_vit.main([*size, "data.source=folder", f"data.train={images}", f"data.val={images}", "data.batch_size=30"])
    for name in ("softmax", "ahla"):
        score = ["fid.extractor=runs/features", f"fid.samples={name}.npz", f"fid.reference={images}", "fid.workers=0"]
        with pytest.warns(UserWarning, match="under 10000"):
            card = evaluate_fid.main(score)
        assert np.isfinite(card["scores"]["fid"]) and (tmp_path / f"{name}.npz.fid.json").is_file()
