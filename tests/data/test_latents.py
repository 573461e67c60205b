"""Extraction of latents and prompt embeddings, and training on them, with tiny random encoders."""

import json

import datasets
import diffusers
import extract_latents
import finetune_dit
import numpy as np
import pytest
import sample
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

import zoo.data.latents.extracting as extracting
from tests.forks import run_fork
from tests.helpers.tiny_runs import tiny
from zoo.data.latents import Latents, read_manifest
from zoo.data.plan import BatchPlan
from zoo.diffusion.loading import load_transformer
from zoo.train.denoising.run import DiffusionRun

CPU = torch.device("cpu")
SMALL = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
TEXT = {"cross_attention_dim": 16, "caption_channels": 8}


def tiny_vae(folder, seed=0):
    torch.manual_seed(seed)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    sizes = {"block_out_channels": [4, 4], "norm_num_groups": 2, "layers_per_block": 1, "scaling_factor": 0.5}
    vae = diffusers.AutoencoderKL(**blocks, **sizes, latent_channels=4, shift_factor=0.1, sample_size=16)
    vae.save_pretrained(folder)
    return vae


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    tiny_vae(folder)
    return folder


@pytest.fixture(scope="module")
def classes(vae, make_folder, tmp_path_factory):
    """Latents of 30 images of three classes, in shards of 8."""
    images = make_folder({"a": 10, "b": 10, "c": 10}, size=20)
    out = tmp_path_factory.mktemp("latents") / "train"
    extract_latents.main(words(images, vae, out))
    return images, out


def words(images, vae, out, *more):
    fixed = ["images.img_size=16", "images.workers=0", "encode.dtype=float32", "encode.shard=8", "encode.batch_size=5"]
    return [f"images.where={images}", f"encode.vae={vae}", f"out={out}", "encode.flip=true", *fixed, *more]


def pixels(images, name):
    picture = Image.open(images / name).convert("RGB").resize((16, 16), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None] / 127.5 - 1


def test_stored_latents_are_those_of_the_vae(classes, vae, tmp_path):
    images, _ = classes
    manifest = extract_latents.main(words(images, vae, tmp_path / "out", "encode.posterior=mean"))
    assert manifest["shape"] == [4, 8, 8] and manifest["shards"] == [8, 8, 8, 6]
    assert (manifest["scaling"], manifest["shift"], manifest["classes"]) == (0.5, 0.1, ["a", "b", "c"])
    found = Latents(str(tmp_path / "out"), str(vae), 0.5, 0, CPU)
    model = diffusers.AutoencoderKL.from_pretrained(vae)
    shard = load_file(tmp_path / "out" / "shard-00001.safetensors")
    assert shard["class_labels"].tolist() == [0, 0, 1, 1, 1, 1, 1, 1] and shard["index"][0] == 8
    with torch.no_grad():
        x = pixels(images, "b/003.png")  # number 13
        wanted = [(model.encode(part).latent_dist.mean - 0.1) * 0.5 for part in (x, x.flip(-1))]
    assert torch.allclose(shard["latents"][5], wanted[0][0], atol=1e-5)
    assert torch.allclose(shard["flipped"][5], wanted[1][0], atol=1e-5)
    batch = list(found.evaluation(7))[1]
    assert batch.index.tolist() == list(range(7, 14)) and torch.equal(batch.x0[6], shard["latents"][5])


def test_draws_depend_on_the_number_of_the_image_only(classes, vae, tmp_path):
    images, out = classes
    extract_latents.main(words(images, vae, tmp_path / "out", "encode.batch_size=3", "encode.shard=30"))
    one = load_file(tmp_path / "out" / "shard-00000.safetensors")["latents"]
    parts = torch.cat([load_file(out / f"shard-{i:05d}.safetensors")["latents"] for i in range(4)])
    assert torch.allclose(one, parts, atol=1e-5)
    mean = tmp_path / "mean"
    extract_latents.main(words(images, vae, mean, "encode.posterior=mean"))
    assert (load_file(mean / "shard-00000.safetensors")["latents"] - parts[:8]).abs().max() > 0.01


def test_an_interrupted_extraction_goes_on(classes, vae, tmp_path, monkeypatch):
    images, out = classes
    calls = []
    encode = extracting.encode_images

    def stopping(model, x, numbers, *more):
        calls.append(numbers[0])
        if numbers[0] == 15:
            raise KeyboardInterrupt
        return encode(model, x, numbers, *more)

    monkeypatch.setattr(extracting, "encode_images", stopping)
    with pytest.raises(KeyboardInterrupt):
        extract_latents.main(words(images, vae, tmp_path / "out"))
    assert not (tmp_path / "out" / "manifest.json").exists()
    with pytest.raises(ValueError, match=r"is not complete: run `zoo extract-latents` again"):
        read_manifest(tmp_path / "out")
    monkeypatch.setattr(extracting, "encode_images", encode)
    with pytest.raises(ValueError, match=r"was begun with another flip"):
        extract_latents.main([w for w in words(images, vae, tmp_path / "out") if w != "encode.flip=true"])
    with pytest.raises(ValueError, match=r"was begun with another keys, seed"):
        extract_latents.main(words(images, vae, tmp_path / "out", "encode.seed=1", "images.label_key=fine_label"))
    extract_latents.main(words(images, vae, tmp_path / "out"))
    for i in range(4):
        name = f"shard-{i:05d}.safetensors"
        one, other = load_file(out / name), load_file(tmp_path / "out" / name)
        assert one.keys() == other.keys() and all(torch.allclose(one[k], other[k], atol=1e-5) for k in one)


def test_batches_are_those_of_the_plan_and_flips_are_stored_ones(classes):
    _, out = classes
    plan = BatchPlan(30, 10, seed=3)
    plain, mirrored, mixed = (Latents(str(out), "", p, 3, CPU) for p in (0.0, 1.0, 0.5))
    found = [next(one.train(plan, 4, 5)) for one in (plain, mirrored, mixed)]
    assert found[0].index.tolist() == plan.step_images(4)[1].tolist()
    flips = [torch.equal(m, f) for m, f in zip(found[2].x0, found[1].x0, strict=True)]
    assert any(flips) and not all(flips) and not torch.equal(found[0].x0, found[1].x0)
    again = next(mixed.train(plan, 4, 5))
    assert torch.equal(again.x0, found[2].x0)


def test_a_run_on_latents_shows_decoded_pictures(classes, vae, tmp_path):
    data = {"source": "latents", "train": str(classes[1]), "val": str(classes[1]), "img_size": None, "batch_size": 10}
    run = DiffusionRun(tiny(tmp_path, data=data, sample={"every": 6, "count": 3}))
    run.train()
    assert load_transformer(tmp_path).config.num_embeds_ada_norm == 3
    assert Image.open(tmp_path / "samples" / "step-00000006.png").size == (128, 128)
    about = json.loads((tmp_path / "input.json").read_text())
    assert about["space"] == "latents" and about["vae"] == str(vae) and about["scaling"] == 0.5
    model = diffusers.AutoencoderKL.from_pretrained(vae)
    x = torch.randn(2, 4, 8, 8)
    wanted = ((model.decode(x / 0.5 + 0.1).sample + 1) * 127.5).round().clamp(0, 255)
    assert (run.samples.to_images(x).float() - wanted).abs().max() <= 1


# Prompts


def tiny_tokenizer():
    words = ["<pad>", "</s>", "<unk>", "a", "photo", "of", "cat", "dog", *[f"w{i}" for i in range(20)]]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, model_max_length=20)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory, vae):
    folder = tmp_path_factory.mktemp("pipeline")
    torch.manual_seed(0)
    text = T5EncoderModel(T5Config(vocab_size=40, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    transformer = diffusers.PixArtTransformer2DModel(**SMALL, **TEXT, sample_size=8, norm_num_groups=2)
    pipe = diffusers.PixArtSigmaPipeline(
        tokenizer=tiny_tokenizer(),
        text_encoder=text.eval(),
        vae=diffusers.AutoencoderKL.from_pretrained(vae),
        transformer=transformer,
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def captioned(tmp_path_factory, make_folder):
    images = make_folder({"x": 12}, size=20)
    file = tmp_path_factory.mktemp("rows") / "rows.parquet"
    column = [{"bytes": p.read_bytes(), "path": p.name} for p in sorted(images.rglob("*.png"))]
    texts = ["a photo of " + ("cat" if i % 2 else "dog") for i in range(12)]
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    datasets.Dataset.from_dict({"image": column, "caption": texts}, features=features).to_parquet(file)
    return file


@pytest.fixture(scope="module")
def prompts(captioned, pipeline, tmp_path_factory):
    out = tmp_path_factory.mktemp("prompts") / "train"
    extract_latents.main(prompt_words(captioned, pipeline, out))
    return out


def prompt_words(captioned, pipeline, out, *more):
    text = ["images.source=parquet", "images.text_key=caption", f"encode.text={pipeline}", "encode.max_length=6"]
    return [*words(captioned, pipeline, out), *text, *more]


def test_prompts_are_encoded_as_the_pipeline_does(prompts, pipeline):
    manifest = read_manifest(prompts)
    assert manifest.text == str(pipeline) and manifest.max_length == 6 and not manifest.classes
    shard = load_file(prompts / "shard-00000.safetensors")
    assert shard["encoder_hidden_states"].shape == (8, 6, 8) and shard["encoder_attention_mask"].shape == (8, 6)
    pipe = diffusers.PixArtSigmaPipeline.from_pretrained(pipeline)
    for prompt, row in (
        ("a photo of cat", {k: v[1] for k, v in shard.items()}),
        ("", load_file(prompts / "null.safetensors")),
    ):
        wanted = pipe.encode_prompt([prompt], do_classifier_free_guidance=False, max_sequence_length=6)
        assert torch.allclose(row["encoder_hidden_states"], wanted[0][0], atol=1e-5)
        assert torch.equal(row["encoder_attention_mask"], wanted[1][0])


@pytest.mark.parametrize("kind", ["pixart", "sana"])
def test_text_to_image_models_are_trained_and_sampled(prompts, tmp_path, kind):
    sana = {"num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "patch_size": 1, "mlp_ratio": 2.0}
    kwargs = {**SMALL, **TEXT, **(sana if kind == "sana" else {"norm_num_groups": 2})}
    objective = {"kind": "flow", "shift": 3.0} if kind == "sana" else {"kind": "ddpm"}
    data = {"source": "latents", "train": str(prompts), "val": str(prompts), "img_size": None, "batch_size": 6}
    sections = {"data": data, "objective": objective, "sample": {"every": 6, "count": 2}}
    model = {"kind": kind, "kwargs": {**kwargs, "patch_size": kwargs.get("patch_size", 2)}}
    DiffusionRun(tiny(tmp_path / "source", **sections, model=model)).train()
    converted = {"kind": kind, "kwargs": {**kwargs, "patch_size": kwargs.get("patch_size", 2)}, "mixer": "ahla"}
    distill = {"teacher": "source", "attention": 0.5}
    folder = tmp_path / "converted"
    source = {"checkpoint": str(tmp_path / "source")}
    DiffusionRun(tiny(folder, **sections, model={**converted, **source}, distill=distill)).train()
    assert (folder / "samples" / "step-00000006.png").is_file()
    assert type(load_transformer(folder)).__name__.startswith("HLA")


def tiny_sd3(folder, vae):
    """An SD3 pipeline: two text encoders of CLIP of width 8, T5 of width 24 in place of both."""
    torch.manual_seed(0)
    small = {"vocab_size": 40, "hidden_size": 8, "intermediate_size": 8, "projection_dim": 10}
    clip = CLIPTextConfig(**small, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=20)
    t5 = T5Config(vocab_size=40, d_model=24, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    width = {"joint_attention_dim": 24, "pooled_projection_dim": 20, "caption_projection_dim": 16}
    sizes = {**SMALL, **width, "in_channels": 4, "out_channels": 4, "sample_size": 8, "pos_embed_max_size": 8}
    diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(**sizes),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=2.5),
        vae=diffusers.AutoencoderKL.from_pretrained(vae),
        **{f"text_encoder{n}": CLIPTextModelWithProjection(clip).eval() for n in ("", "_2")},
        **{f"tokenizer{n}": tiny_tokenizer() for n in ("", "_2", "_3")},
        text_encoder_3=T5EncoderModel(t5).eval(),
    ).save_pretrained(folder)
    return folder


def test_sd3_from_images_to_samples(captioned, vae, tmp_path):
    """Prompts encoded, transformer converted and trained by the tool, sampled in the pipeline it came from."""
    pipeline, latents, run = tiny_sd3(tmp_path / "sd3", vae), tmp_path / "latents", tmp_path / "run"
    extract_latents.main([w for w in prompt_words(captioned, pipeline, latents) if w != "encode.flip=true"])
    pipe = diffusers.DiffusionPipeline.from_pretrained(pipeline)
    wanted = pipe.encode_prompt("a photo of cat", None, None, do_classifier_free_guidance=False, max_sequence_length=6)
    shard = load_file(latents / "shard-00000.safetensors")
    assert torch.allclose(shard["encoder_hidden_states"][1], wanted[0][0], atol=1e-5)
    assert torch.allclose(shard["pooled_projections"][1], wanted[2][0], atol=1e-5)
    data = ["source=latents", f"train={latents}", f"val={latents}", "batch_size=4", "hflip=0.0"]
    steps = ["schedule.steps=2", "sample.count=2", "sample.steps=2", "optim.ema=0.5", f"run.folder={run}"]
    model = [f"model.checkpoint={pipeline}", "model.mixer=la", "distill.teacher=source", "distill.attention=0.5"]
    words = [*(f"data.{word}" for word in data), *steps, *model]
    status, out, err = run_fork("tools/finetune_dit.py", "--dry-run", *words)
    assert status == 0, err
    assert json.loads(out.splitlines()[-1])["step"] == 1
    assert finetune_dit.main(words)["step"] == 2
    tuned = run / "transformer_ema"
    assert diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(tuned / "scheduler").config.shift == 2.5
    (tmp_path / "prompts.txt").write_text("a photo of cat\na photo of dog\n")
    options = ["count=4", "steps=2", "size=16", "batch_size=3", f"prompts={tmp_path}/prompts.txt"]
    for name, words in (("base", [f"model={pipeline}"]), ("tuned", [f"model={tuned}", f"base={pipeline}"])):
        assert sample.main([*(f"sample.{w}" for w in (*options, *words)), f"out={tmp_path}/{name}.npz"]) == 4
    images = [np.load(tmp_path / f"{name}.npz")["arr_0"] for name in ("base", "tuned")]
    assert images[1].shape == (4, 16, 16, 3) and (images[0] != images[1]).any()


# Bad input


def test_latents_of_another_vae(classes, vae, tmp_path):
    data = {"source": "latents", "train": str(classes[1]), "val": str(classes[1]), "img_size": None, "batch_size": 10}
    with pytest.raises(ValueError, match=r"are of another VAE: .*, the run's is other$"):
        DiffusionRun(tiny(tmp_path / "a", data={**data, "vae": "other"}))
    DiffusionRun(tiny(tmp_path / "b", data=data)).train()
    tiny_vae(tmp_path / "vae2", seed=1)
    extract_latents.main(words(classes[0], tmp_path / "vae2", tmp_path / "latents2"))
    other = {**data, "train": str(tmp_path / "latents2"), "val": str(tmp_path / "latents2")}
    model = {"kwargs": {}, "checkpoint": str(tmp_path / "b" / "transformer_ema")}
    with pytest.raises(ValueError, match=r"was trained with a different VAE"):
        DiffusionRun(tiny(tmp_path / "c", data=other, model=model))
    with pytest.raises(ValueError, match=r"are of another VAE"):
        DiffusionRun(tiny(tmp_path / "d", data={**other, "val": str(classes[1])}))


def test_latents_without_flips_or_with_a_size(classes, vae, tmp_path):
    images = classes[0]
    plain = tmp_path / "plain"
    extract_latents.main([w for w in words(images, vae, plain) if w != "encode.flip=true"])
    data = {"source": "latents", "train": str(plain), "val": str(plain), "batch_size": 10, "hflip": 0.5}
    with pytest.raises(ValueError, match=r"no latents of mirrored images"):
        DiffusionRun(tiny(tmp_path / "a", data={**data, "img_size": None}))
    with pytest.raises(ValueError, match=r"data.img_size is for images"):
        DiffusionRun(tiny(tmp_path / "b", data=data))
    with pytest.raises(ValueError, match=r"holds no latents: no manifest.json"):
        read_manifest(images)
    shard = tmp_path / "plain" / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"shard-00001.safetensors is truncated or damaged"):
        Latents(str(plain), "", 0.0, 0, CPU)


def test_text_that_is_too_long(captioned, pipeline, tmp_path):
    with pytest.raises(ValueError, match=r"max_length is 21, but the text encoder of .* allows 20 tokens"):
        extract_latents.main(prompt_words(captioned, pipeline, tmp_path / "a", "encode.max_length=21"))
    short = prompt_words(captioned, pipeline, tmp_path / "b", "encode.max_length=3")
    with pytest.raises(
        ValueError, match=r"the prompt 'a photo of dog' is 4 tokens long, more than encode.max_length=3"
    ):
        extract_latents.main(short)
    extract_latents.main([*short, "encode.truncate=true"])
    assert load_file(tmp_path / "b" / "shard-00000.safetensors")["encoder_hidden_states"].shape[1] == 3


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["images.img_size=15"], r"img_size=15 is not divisible by 2, the step of the VAE"),
        (["encode.vae=nowhere"], r"there is no VAE 'nowhere'"),
        (["encode.text=nowhere"], r"an extraction needs out=FOLDER"),
        (["encode.posterior=mode"], r"unknown encode.posterior 'mode'"),
    ],
)
def test_wrong_extractions(classes, vae, tmp_path, monkeypatch, more, sentence):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # without, retries take most of a minute
    with pytest.raises(ValueError, match=sentence):
        extract_latents.main([*words(classes[0], vae, tmp_path / "out"), *more])
