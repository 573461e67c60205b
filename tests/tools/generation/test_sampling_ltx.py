"""LTX-Video, converted and sampled by the tool, against diffusers' own pipeline."""

import diffusers
import numpy as np
import pytest
import torch
from tiny_diffusion import letters

import zoo
from zoo.data.video.files import about
from zoo.eval.generation.sampling import open_sampler, run
from zoo.eval.generation.settings import SampleOptions, SampleSettings

TRANSFORMER = {
    "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 3, "in_channels": 8, "out_channels": 8,
    "cross_attention_dim": 32, "caption_channels": 16,
}  # fmt: skip


def tiny_vae():
    """Latents of 8 channels, a quarter as long and wide."""
    torch.manual_seed(1)
    once, twice = (True, True, False, False), {}
    for side in ("", "decoder_"):
        twice |= {f"{side}block_out_channels": (8,) * 4, f"{side}layers_per_block": (1,) * 5}
        twice |= {f"{side}spatio_temporal_scaling": once}
    more = {"decoder_inject_noise": (False,) * 5, "upsample_residual": (False,) * 4, "upsample_factor": (1,) * 4}
    return diffusers.AutoencoderKLLTXVideo(latent_channels=8, patch_size=1, patch_size_t=1, **twice, **more).eval()


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
    run(SampleSettings(sample=sample, out=str(tmp_path / "videos")), "command")
    assert about(tmp_path / "videos" / "000000.mp4") == (9, 32, 64, 25.0)
    for wrong, sentence in (({"frames": 8}, r"sample.frames must be 4 n \+ 1"), ({"size": 18}, "multiple of 4")):
        with pytest.raises(ValueError, match=sentence):
            open_sampler(SampleOptions(model=pipe, **(shape | wrong)), "cpu")
