"""Tiny random diffusion models for the tests of sampling."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    PixArtAlphaPipeline,
    PixArtTransformer2DModel,
)

SHAPE = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "patch_size": 2}


def tiny_dit(channels: int = 3, learned: bool = False, classes: int = 10, **changes: Any) -> DiTTransformer2DModel:
    """A class-conditional transformer of 16 tokens whose classes and times make a difference."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        out = 2 * channels if learned else channels
        sizes = SHAPE | {"in_channels": channels, "out_channels": out, "num_embeds_ada_norm": classes} | changes
        model = DiTTransformer2DModel(**sizes)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def tiny_vae() -> AutoencoderKL:
    """Latents of 4 channels, half as wide as the image."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
        return AutoencoderKL(block_out_channels=[8, 8], norm_num_groups=4, latent_channels=4, **blocks).eval()


def tiny_pipeline(folder: Path) -> str:
    """A DiTPipeline with 1000 classes."""
    pipe = DiTPipeline(tiny_dit(4, learned=True, classes=1000), tiny_vae(), DDIMScheduler())
    pipe.save_pretrained(folder)
    return str(folder)


def tiny_pixels(folder: Path, **changes: Any) -> str:
    """Save a pixel transformer of 10 classes and a flow-matching scheduler."""
    tiny_dit(**changes).save_pretrained(folder)
    FlowMatchEulerDiscreteScheduler().save_pretrained(folder / "scheduler")
    return str(folder)


def letters(length: int = 16) -> tuple[Any, Any]:
    """A tokenizer of 26 one-letter words, at most `length` of them, and a text encoder of 16 channels."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    words = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {chr(97 + i): 3 + i for i in range(26)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=length
    )
    with torch.random.fork_rng():
        torch.manual_seed(2)
        encoder = T5EncoderModel(T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    return tokenizer, encoder.eval()


def tiny_text_pipeline(folder: Path) -> str:
    """A PixArt pipeline that reads at most 16 of 26 one-letter words."""
    tokenizer, encoder = letters()
    with torch.random.fork_rng():
        torch.manual_seed(2)
        sizes = SHAPE | {"in_channels": 4, "out_channels": 8, "cross_attention_dim": 16, "caption_channels": 16}
        transformer = PixArtTransformer2DModel(**sizes, use_additional_conditions=False)
    PixArtAlphaPipeline(tokenizer, encoder, tiny_vae(), transformer, DDIMScheduler()).save_pretrained(folder)
    return str(folder)
