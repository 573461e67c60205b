"""Tiny pipelines of diffusers, and their outputs."""

import diffusers
import torch

from tests.helpers.tiny_diffusers import CASES, build, host, noise

SMALL_VAE = {
    "block_out_channels": (8,),
    "norm_num_groups": 4,
    "down_block_types": ("DownEncoderBlock2D",),
    "up_block_types": ("UpDecoderBlock2D",),
}


def vae(channels: int = 4) -> diffusers.AutoencoderKL:
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(latent_channels=channels, sample_size=8, shift_factor=0.0, **SMALL_VAE).eval()


def wan_vae() -> diffusers.AutoencoderKLWan:
    torch.manual_seed(0)
    mean = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    return diffusers.AutoencoderKLWan(base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **mean).eval()


def text(*names: str) -> dict[str, None]:
    return dict.fromkeys(names)


def pipeline(name: str) -> tuple[diffusers.DiffusionPipeline, dict]:
    """A tiny pipeline without text encoders, and the arguments of a call that makes one image."""
    flow = diffusers.FlowMatchEulerDiscreteScheduler()
    prompt = {"prompt_embeds": noise(1, 5, 24), "negative_prompt_embeds": noise(1, 5, 24, seed=5)}
    pooled = {"pooled_prompt_embeds": noise(1, 20)}
    no_text = text("text_encoder", "tokenizer")
    size = {"height": 16, "width": 16}
    if name == "dit":
        transformer = build(CASES[name], num_embeds_ada_norm=1000)  # the label that the pipeline has for "no class"
        return diffusers.DiTPipeline(transformer, vae(), diffusers.DDIMScheduler()), {"class_labels": [1]}
    if name == "pixart":
        mask = {"prompt_attention_mask": torch.ones(1, 5), "negative_prompt_attention_mask": torch.ones(1, 5)}
        pipe = diffusers.PixArtSigmaPipeline(
            transformer=host(name), vae=vae(), scheduler=diffusers.DDIMScheduler(), **no_text
        )
        return pipe, {**prompt, **mask, **size, "negative_prompt": None, "use_resolution_binning": False}
    if name == "sd3":
        two = text("text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
        pipe = diffusers.StableDiffusion3Pipeline(transformer=host(name), vae=vae(), scheduler=flow, **no_text, **two)
        negative = {"negative_pooled_prompt_embeds": noise(1, 20, seed=6)}
        return pipe, {**prompt, **pooled, **negative, **size}
    if name == "flux":
        two = text("text_encoder_2", "tokenizer_2")
        transformer = build(CASES[name], in_channels=16)
        pipe = diffusers.FluxPipeline(transformer=transformer, vae=vae(), scheduler=flow, **no_text, **two)
        return pipe, {"prompt_embeds": prompt["prompt_embeds"], **pooled, **size}
    pipe = diffusers.WanPipeline(
        transformer=host("wan"), transformer_2=build(CASES["wan"], seed=7), boundary_ratio=0.5, vae=wan_vae(),
        scheduler=diffusers.UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"), **no_text,
    )  # fmt: skip
    return pipe, {**prompt, "height": 32, "width": 32, "num_frames": 5}


def image(pipe, arguments) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    kind = "np" if "num_frames" in arguments or "class_labels" in arguments else "pt"
    made = pipe(num_inference_steps=2, generator=generator, output_type=kind, **arguments)
    return torch.as_tensor(made.frames if hasattr(made, "frames") else made.images)
