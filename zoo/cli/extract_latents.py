"""Encode images or videos, and prompts, once for training: VAE latents and text embeddings in shards.

    zoo extract-latents images.where=IMAGENET/train encode.vae=stabilityai/sd-vae-ft-ema encode.flip=true \\
        out=latents/train
    zoo extract-latents images.source=webdataset images.where='shard-{000..099}.tar' images.image_key=jpg \\
        images.text_key=txt encode.vae=PIXART encode.text=PIXART images.img_size=512 out=latents/train

Rerun the same command to resume an interrupted extraction. `zoo finetune-diffusion` reads the folder with
data.source=latents data.train=latents/train.
"""

from typing import Any

from zoo import config
from zoo.data.latents.extracting import extract_latents
from zoo.data.latents.settings import ExtractSettings

USAGE = "usage: zoo extract-latents [CONFIG.yaml] images.where=IMAGES encode.vae=VAE out=FOLDER [section.key=value ...]"


def main(words: list[str]) -> dict[str, Any]:
    """Run an extraction from command-line arguments. Returns the manifest; raises ValueError."""
    if config.print_help_if_asked(words, __doc__, USAGE, ExtractSettings):
        return {}
    settings = config.from_command_line(ExtractSettings, words)
    manifest = extract_latents(settings)
    shape = " x ".join(str(n) for n in manifest.shape)
    print(f"wrote {sum(manifest.shards)} latents of {shape} in {len(manifest.shards)} shards to {settings.out}")
    return config.to_tree(manifest)
