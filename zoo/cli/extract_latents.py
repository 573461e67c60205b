"""Encode images once: VAE latents, with class numbers or prompt embeddings, as sharded safetensors with a manifest.

    zoo extract-latents images.where=IMAGENET/train encode.vae=stabilityai/sd-vae-ft-ema encode.flip=true \\
        out=latents/train
    zoo extract-latents images.source=webdataset images.where='shard-{000..099}.tar' images.image_key=jpg \\
        images.text_key=txt encode.vae=PIXART encode.text=PIXART images.img_size=512 out=latents/train

An interrupted extraction goes on when the same command is run again; zoo finetune-diffusion and finetune_t2i.py read
the folder (data.source=latents data.train=latents/train).
"""

from typing import Any

from zoo import config
from zoo.data.latents.extracting import extract_latents
from zoo.data.latents.settings import ExtractSettings

USAGE = "usage: zoo extract-latents [CONFIG.yaml] images.where=IMAGES encode.vae=VAE out=FOLDER [section.key=value ...]"


def main(words: list[str]) -> dict[str, Any]:
    """Encode as the words of the command line say. Returns the manifest; raises ValueError."""
    if config.wants_help(words, __doc__, USAGE, ExtractSettings):
        return {}
    settings = config.from_command_line(ExtractSettings, words)
    manifest = extract_latents(settings)
    shape = " x ".join(str(n) for n in manifest.shape)
    print(f"wrote {sum(manifest.shards)} latents of {shape} in {len(manifest.shards)} shards to {settings.out}")
    return config.to_tree(manifest)
