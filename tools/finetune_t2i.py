"""Train a text-to-image transformer (PixArt, Sana, SD3) on cached latents and prompt embeddings, with any mixer.

    python tools/extract_latents.py images.text_key=txt ... out=latents/train
    accelerate launch tools/finetune_t2i.py configs/t2i/pixart_sigma.yaml data.train=latents/train data.val=latents/val

The core and the keys are those of tools/finetune_dit.py; losses beside that of the data are the distance to the
softmax teacher's output and, block by block, to what its attention returns. `--dry-run` does one step of everything.
"""

from typing import Any

from zoo import config
from zoo.train.denoising.dry_run import carry_out
from zoo.train.denoising.settings import DiffusionSettings

USAGE = "usage: finetune_t2i.py [--dry-run] CONFIG.yaml data.train=LATENTS data.val=LATENTS [section.key=value ...]"


def check(settings: DiffusionSettings) -> None:
    """Raise ValueError for data that this tool does not read."""
    if settings.data.source != "latents":
        raise ValueError(f"data.source is {settings.data.source!r}: prompts come with latents, from extract_latents.py")


def main(words: list[str]) -> dict[str, Any]:
    """Train as the words of the command line say. Returns the result (validation losses); raises ValueError."""
    return carry_out(words, __doc__, USAGE, check)


if __name__ == "__main__":
    config.command_line(main)
