"""Train a class-conditional diffusion transformer, from scratch or from a softmax checkpoint, with any mixer.

    zoo finetune-diffusion configs/dit/digits.yaml
    zoo finetune-diffusion configs/dit/digits_finetune.yaml model.checkpoint=runs/digits_dit model.mixer=multipole
    accelerate launch -m zoo.cli finetune-diffusion dit/imagenet/xl_256_finetune data.train=TRAIN data.val=VAL

On pixels (small images) or on latents of zoo extract-latents. Several processes: start it with `accelerate
launch` (DDP, FSDP2 or DeepSpeed, see configs/accelerate) or `torchrun`. Continue an interrupted run with
run.resume=true; `--dry-run` does one step of everything in a folder of its own. The last line of the output is the
result as JSON, also in result.json of the run folder.
"""

from typing import Any

from zoo.train.denoising.dry_run import carry_out

USAGE = "usage: zoo finetune-diffusion [--dry-run] [CONFIG.yaml] [section.key=value ...]"


def main(words: list[str]) -> dict[str, Any]:
    """Train as the words of the command line say. Returns the result (validation losses); raises ValueError."""
    return carry_out(words, __doc__, USAGE)
