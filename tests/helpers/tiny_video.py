"""A tiny Wan with random weights that generates clips of 5 frames of 16 x 16 pixels, and clips on disk."""

from pathlib import Path
from typing import Any

import diffusers
import torch

from zoo.data.video import ClipShape, MovingDigits
from zoo.data.video.clips import CAPTIONS
from zoo.data.video.files import write_video
from zoo.io import write_csv

SHAPE = ClipShape(frames=5, height=16, width=16)
SIZES = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 4, "ffn_dim": 16, "freq_dim": 8}
WORDS = 16  # channels of the text encoder
EYE = 12  # and of the image encoder


def write_moving_digits(folder: Path, clips: MovingDigits) -> None:
    """Write the clips into `folder` as mp4 files, and metadata.csv with the name of the digit in the column `text`."""
    rows = []
    for number in range(len(clips)):
        video, label = clips.read(number)
        file = f"{number:05d}.mp4"
        write_video(video.permute(1, 2, 3, 0).numpy(), folder / file, clips.fps)
        rows.append((file, clips.classes[label]))
    write_csv(("file_name", "text"), rows, folder / CAPTIONS)


def tiny_wan(channels: int = 4, seed: int = 0, **changes: Any) -> diffusers.WanTransformer3DModel:
    """A transformer whose text and times make a difference."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sizes = SIZES | {"in_channels": channels, "out_channels": 4, "text_dim": WORDS} | changes
        model = diffusers.WanTransformer3DModel(**sizes)
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


def tiny_vae() -> diffusers.AutoencoderKLWan:
    """Latents of 4 channels, a quarter as long and an eighth as wide."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        spread = {"latents_mean": [0.1, -0.2, 0.0, 0.3], "latents_std": [0.5, 1.0, 2.0, 1.5]}
        vae = diffusers.AutoencoderKLWan(base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **spread)
    return vae.eval()


def tiny_pipeline(folder: Path, from_image: bool = False, eye: bool = False, boundary: float | None = None) -> str:
    """A pipeline from text (or also an image, like Wan 2.2, or with an image encoder, `eye`, like Wan 2.1) that reads
    one-letter words. boundary: with a second transformer, for times below it, like Wan 2.2 A14B."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    words = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {character: 3 + i for i, character in enumerate("0123456789ab")}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
    with torch.random.fork_rng():
        torch.manual_seed(2)
        sizes = UMT5Config(vocab_size=32, d_model=WORDS, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        encoder = UMT5EncoderModel(sizes).eval()
    kind = diffusers.WanImageToVideoPipeline if from_image else diffusers.WanPipeline
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    sees = {"image_dim": EYE, "added_kv_proj_dim": 16} if eye else {}
    transformer = tiny_wan(12 if from_image else 4, **sees)
    more = _eye() if eye else {}
    if boundary is not None:
        more |= {"transformer_2": tiny_wan(12 if from_image else 4, seed=9), "boundary_ratio": boundary}
    kind(tokenizer, encoder, tiny_vae(), scheduler, transformer=transformer, **more).save_pretrained(folder)
    return str(folder)


def _eye() -> dict[str, Any]:
    """Return an image encoder of 5 tokens and its image processor."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": EYE, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        encoder = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=8, patch_size=4)).eval()
    square = {"height": 8, "width": 8}
    return {
        "image_encoder": encoder,
        "image_processor": CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=square),
    }


def clips_on_disk(folder: Path, train: bool, count: int) -> Path:
    """mp4 files of moving digits with metadata.csv."""
    write_moving_digits(folder, MovingDigits(train, SHAPE, count))
    return folder
