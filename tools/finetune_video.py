"""Train a video transformer (Wan, text or image to video, LTX-Video, or a small one from scratch), with any mixer.

    python tools/finetune_video.py configs/video/moving_digits.yaml
    python tools/extract_latents.py images.source=videos images.text_key=text ... out=latents/train
    accelerate launch tools/finetune_video.py configs/video/wan_1.3b_hybrid.yaml data.train=latents/train data.val=VAL

On cached latents and prompt embeddings, or on the pixels of small videos. The core and the keys are those of
tools/finetune_dit.py; `model.keep_softmax=every:3` converts two layers of three. The run folder also gets its samples
as mp4 and contact sheets. `--dry-run` does one step of everything; run.resume=true continues an interrupted run.
"""

from typing import Any

from zoo import config
from zoo.data.latents.settings import VIDEOS
from zoo.train.denoising.dry_run import carry_out
from zoo.train.denoising.settings import DiffusionSettings

USAGE = "usage: finetune_video.py [--dry-run] CONFIG.yaml [section.key=value ...]"


def check(settings: DiffusionSettings) -> None:
    """Raise ValueError for data that this tool does not read."""
    if settings.data.source not in (*VIDEOS, "latents"):
        raise ValueError(f"data.source is {settings.data.source!r}; allowed for videos: {', '.join(VIDEOS)}, latents")


def main(words: list[str]) -> dict[str, Any]:
    """Train as the words of the command line say. Returns the result (validation losses); raises ValueError."""
    return carry_out(words, __doc__, USAGE, check)


if __name__ == "__main__":
    config.command_line(main)
