"""LTX-Video, converted, sampled and trained by the tools, against diffusers' own pipeline."""

import diffusers
import numpy as np
import pytest
import torch

import zoo
from tests.helpers.sampling import whole_and_streamed
from tests.helpers.tiny_diffusion import letters
from tests.helpers.tiny_video import write_moving_digits
from zoo import config
from zoo.data.latents import Latents
from zoo.data.latents.encoders import decode_latents, load_vae
from zoo.data.latents.extracting import extract_latents
from zoo.data.latents.settings import ExtractSettings
from zoo.data.video import Clips, ClipShape, MovingDigits
from zoo.data.video.files import video_info
from zoo.diffusion.call import call_denoiser, call_spec
from zoo.eval.sample_settings import SampleOptions, SampleSettings
from zoo.eval.sampling import open_sampler, run_sampling
from zoo.train.denoising.run import DiffusionRun
from zoo.train.denoising.settings import DiffusionSettings
from zoo.train.metrics_log import read_rows

TRANSFORMER = {
    "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 3, "in_channels": 8, "out_channels": 8,
    "cross_attention_dim": 32, "caption_channels": 16,
}  # fmt: skip


def tiny_vae(**more):
    """Latents of 8 channels, a quarter as long and wide."""
    torch.manual_seed(1)
    once, twice = (True, True, False, False), {}
    for side in ("", "decoder_"):
        twice |= {f"{side}block_out_channels": (8,) * 4, f"{side}layers_per_block": (1,) * 5}
        twice |= {f"{side}spatio_temporal_scaling": once}
    more |= {"decoder_inject_noise": (False,) * 5, "upsample_residual": (False,) * 4, "upsample_factor": (1,) * 4}
    vae = diffusers.AutoencoderKLLTXVideo(latent_channels=8, patch_size=1, patch_size_t=1, **twice, **more).eval()
    vae.latents_mean.copy_(torch.linspace(-1, 1, 8))
    vae.latents_std.copy_(torch.linspace(0.5, 2, 8))
    return vae


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    tokenizer, encoder = letters(length=128)
    torch.manual_seed(0)
    transformer = diffusers.LTXVideoTransformer3DModel(**TRANSFORMER).eval()
    for parameter in transformer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    folder = tmp_path_factory.mktemp("ltx")
    diffusers.LTXPipeline(scheduler, tiny_vae(), encoder, tokenizer, transformer).save_pretrained(folder)
    return str(folder)


def test_a_converted_ltx_makes_the_videos_of_its_pipeline(tmp_path, pipe):
    whole = diffusers.LTXPipeline.from_pretrained(pipe)
    zoo.convert(whole, "mhla", blocks=[1, 2, 2], keep_softmax="every:3")
    whole.transformer.save_pretrained(tmp_path / "mhla")
    whole.set_progress_bar_config(disable=True)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a b\n")
    shape = {"size": 32, "width": 64, "frames": 9, "steps": 2, "guidance": 3.0, "prompts": str(prompts)}
    sampler = open_sampler(SampleOptions(model=str(tmp_path / "mhla"), base=pipe, **shape), "cpu")
    ours = sampler([0])
    theirs = whole(
        "a b", height=32, width=64, num_frames=9, num_inference_steps=2, guidance_scale=3.0, output_type="np",
        generator=torch.Generator().manual_seed(0),
    ).frames  # fmt: skip
    theirs = torch.from_numpy((theirs * 255 + 0.5).astype(np.uint8)).permute(0, 4, 1, 2, 3)
    assert ours.shape == (1, 3, 9, 32, 64) and (ours.int() - theirs.int()).abs().max() <= 1
    softmax = open_sampler(SampleOptions(model=pipe, **shape), "cpu")([0])
    assert (ours.int() - softmax.int()).abs().max() > 1
    sample = SampleOptions(model=str(tmp_path / "mhla"), base=pipe, count=1, **shape)
    run_sampling(SampleSettings(sample=sample, out=str(tmp_path / "videos")), "command")
    assert video_info(tmp_path / "videos" / "000000.mp4") == (9, 32, 64, 25.0)
    for wrong, sentence in (({"frames": 8}, r"sample.frames must be 4 n \+ 1"), ({"size": 18}, "multiple of 4")):
        with pytest.raises(ValueError, match=sentence):
            open_sampler(SampleOptions(model=pipe, **(shape | wrong)), "cpu")


def test_a_frame_causal_ltx_streams_the_videos_of_its_pipeline(tmp_path, pipe):
    model = diffusers.LTXPipeline.from_pretrained(pipe).transformer
    zoo.convert(model, "hla2", causal="frame")
    model.save_pretrained(tmp_path / "frames")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a b\n")
    shape = {"size": 32, "width": 64, "frames": 17, "steps": 2, "guidance": 3.0, "prompts": str(prompts)}
    found = whole_and_streamed(tmp_path / "frames", pipe, shape)
    assert found[0].shape == (1, 3, 17, 32, 64) and (found[0] - found[1]).abs().max() <= 1
    with pytest.raises(ValueError, match="causal='frame' in every attention layer"):
        open_sampler(SampleOptions(model=pipe, stream=True, **shape), "cpu")
    with pytest.raises(ValueError, match=r"sample.stream does not go with sample.compile"):
        SampleOptions(model=pipe, stream=True, compile=True)


CLIP = ClipShape(frames=9, height=32, width=64)


@pytest.fixture(scope="module")
def latents(tmp_path_factory, pipe):
    """(folder of clips, folder of their latents and prompts)."""
    clips, out = tmp_path_factory.mktemp("clips"), tmp_path_factory.mktemp("data") / "latents"
    digits = MovingDigits(True, CLIP, 4)
    digits.fps = 25.0
    write_moving_digits(clips, digits)
    words = ["a b", "c", "d e f", "a"]
    (clips / "metadata.csv").write_text("file_name,text\n" + "".join(f"{i:05d}.mp4,{w}\n" for i, w in enumerate(words)))
    images = {"source": "videos", "where": str(clips), "text_key": "text", "img_size": 32, "width": 64, "frames": 9}
    encode = {"vae": pipe, "text": pipe, "max_length": 12, "posterior": "mean", "dtype": "float32", "device": "cpu"}
    manifest = extract_latents(
        config.from_tree(ExtractSettings, {"images": images | {"workers": 0}, "encode": encode, "out": str(out)})
    )
    assert manifest.shape == [8, 3, 8, 16] and manifest.fps == 25
    return str(clips), str(out)


def run_of(folder, latents, model, **sections):
    tree = {
        "model": model,
        "data": {"source": "latents", "train": latents, "val": latents, "batch_size": 2, "hflip": 0.0},
        "optim": {"lr": 3e-3, "weight_decay": 0.0},
        "schedule": {"steps": 4},
        "sample": {"every": 4, "count": 2, "steps": 2},
        "run": {"folder": str(folder), "precision": "fp32", "eval_steps": 4, "checkpoint_steps": 4},
        "log": {"every": 1},
    }
    return DiffusionRun(config.from_tree(DiffusionSettings, config.merge(tree, sections)))


@torch.no_grad()
def test_latents_and_prompts_are_those_of_the_pipeline(pipe, latents):
    whole = diffusers.LTXPipeline.from_pretrained(pipe)
    found = next(Latents(latents[1], pipe, 0.0, 0, torch.device("cpu")).evaluation(4))
    clips = Clips(latents[0], CLIP, "text")
    x = torch.stack([clips.read(i)[0] for i in range(4)]).float() / 127.5 - 1
    vae = whole.vae
    wanted = whole._normalize_latents(vae.encode(x).latent_dist.mode(), vae.latents_mean, vae.latents_std)
    torch.testing.assert_close(found.x0, wanted)
    prompts = [clips.read(i)[1] for i in range(4)]
    tokens, mask, *_ = whole.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=12)
    torch.testing.assert_close(found.condition["encoder_hidden_states"], tokens)
    assert torch.equal(found.condition["encoder_attention_mask"], mask.bool()) and mask.sum() < mask.numel()
    pixels = whole.vae.decode(vae.encode(x).latent_dist.mode()).sample
    torch.testing.assert_close(decode_latents(vae, found.x0, [1 / s for s in vae.latents_std.tolist()],
                                              vae.latents_mean.tolist()), pixels)  # fmt: skip


@torch.no_grad()
def test_a_decoder_that_is_told_how_noisy_the_latents_are(tmp_path):
    tiny_vae(timestep_conditioning=True).save_pretrained(tmp_path / "vae")
    vae, z = load_vae(str(tmp_path / "vae")), torch.randn(2, 8, 2, 4, 4)
    torch.testing.assert_close(decode_latents(vae, z, 1.0, 0.0), vae.decode(z, torch.zeros(2)).sample)


@torch.no_grad()
def test_the_transformer_is_called_as_by_the_pipeline(tmp_path, pipe, latents):
    """At the first step of the pipeline, whose noise, prompts and guidance the call of a run gets too."""
    calls = []
    whole = diffusers.LTXPipeline.from_pretrained(pipe)
    whole.set_progress_bar_config(disable=True)
    whole.transformer.register_forward_pre_hook(lambda m, args, kwargs: calls.append(kwargs), with_kwargs=True)
    run = run_of(tmp_path, latents[1], {"checkpoint": pipe})
    batch = next(run.samples.evaluation(4, 0, 1))
    whole(
        prompt_embeds=batch.condition["encoder_hidden_states"], guidance_scale=1.0, num_inference_steps=1,
        prompt_attention_mask=batch.condition["encoder_attention_mask"], height=32, width=64, num_frames=9,
        latents=batch.x0.flatten(2).mT, output_type="latent",
    )  # fmt: skip
    seen = whole.transformer.register_forward_hook(lambda m, args, kwargs, out: calls.append(out[0]), with_kwargs=True)
    time = calls[0]["timestep"]
    found = call_denoiser(whole.transformer, batch.x0, time, batch.condition, run.spec)
    seen.remove()
    theirs, ours, out = calls
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]) if torch.is_tensor(value) else value == theirs[name], name
    assert set(theirs) - set(ours) == {"attention_kwargs"}
    torch.testing.assert_close(found.flatten(2).mT, out)
    torch.testing.assert_close(found, call_denoiser(run.model, batch.x0, time, batch.condition, run.spec))
    assert run.spec == call_spec(whole.transformer, (8, 3, 8, 16), {"image_size": [9, 32, 64], "fps": 25.0})


def test_a_converted_ltx_is_trained_and_sampled(tmp_path, pipe, latents):
    import finetune_dit

    from tests.helpers.runs import ROOT

    data = [f"data.train={latents[1]}", f"data.val={latents[1]}", "data.batch_size=2", "data.val_images=2"]
    steps = ["schedule.steps=20", "schedule.warmup_steps=1", "optim.grad_accum_steps=1", "log.every=1", "optim.lr=1e-2"]
    ends = ["run.eval_steps=20", "run.checkpoint_steps=20", "sample.every=20", "sample.count=2", "sample.steps=2"]
    mixer = ["model.mixer=mhla", f"model.checkpoint={pipe}", f"run.folder={tmp_path}/run", "run.precision=fp32"]
    # blocks recomputed in the backward pass, softmax in each third, both teachers
    result = finetune_dit.main([f"{ROOT}/configs/video/wan_1.3b_hybrid.yaml", *data, *steps, *ends, *mixer])
    assert result["model"] == "HLALTXVideoTransformer3DModel with the mixer mhla"
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    found = [row["attention"] for row in rows if row["kind"] == "train"]
    assert (
        np.mean(found[-4:]) < 0.8 * np.mean(found[:4])
        and video_info(tmp_path / "run" / "samples" / "step-00000020.mp4").fps == 25
    )
    trained = zoo.HLALTXVideoTransformer3DModel.from_pretrained(tmp_path / "run" / "transformer")
    assert trained.transformer_blocks[1].attn1.mixer.blocks == (1, 3, 6)  # 18^2 is about 3 x 8 x 16 tokens
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a b\n")
    shape = {"size": 32, "width": 64, "frames": 9, "steps": 2, "prompts": str(prompts), "count": 1}
    sample = SampleOptions(model=str(tmp_path / "run" / "transformer"), base=pipe, **shape)
    run_sampling(SampleSettings(sample=sample, out=str(tmp_path / "videos")), "command")
    assert video_info(tmp_path / "videos" / "000000.mp4") == (9, 32, 64, 25.0)


def test_an_ltx_from_scratch_reads_prompts_only(tmp_path, latents):
    sizes = {k: v for k, v in TRANSFORMER.items() if k not in ("in_channels", "out_channels")}
    run_of(tmp_path / "run", latents[1], {"kind": "ltx", "kwargs": sizes}, sample={"every": 0}).train()
    assert (tmp_path / "run" / "transformer" / "config.json").is_file()
    digits = {"source": "moving_digits", "img_size": 8, "frames": 4, "train": "", "val": ""}
    with pytest.raises(ValueError, match=r"model.kind=ltx is a model of prompts, but the data has 10 classes"):
        run_of(tmp_path / "x", latents[1], {"kind": "ltx", "kwargs": sizes}, data=digits)
