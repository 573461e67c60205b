"""Train or fine-tune a diffusion transformer with softmax or any mixer, on images or videos.

    zoo finetune-diffusion dit/digits
    zoo finetune-diffusion dit/digits_finetune model.checkpoint=runs/digits_dit model.mixer=multipole
    zoo finetune-diffusion video/moving_digits
    accelerate launch -m zoo.cli finetune-diffusion t2i/pixart_sigma data.train=LATENTS data.val=LATENTS
    accelerate launch -m zoo.cli finetune-diffusion video/wan_1.3b_hybrid data.train=LATENTS data.val=LATENTS

The data are pixels (small images or videos with class labels) or the latents of `zoo extract-latents` (with class
labels, or with prompts for text-conditional models). For several processes, start the command with `accelerate launch`
(DDP, FSDP2 or DeepSpeed, see configs/accelerate) or `torchrun`. Resume an interrupted run with run.resume=true.
`--dry-run` does every part of a run once, with a small batch on a CPU, in a separate folder. The run folder also gets
samples: grids of images, or mp4 files and contact sheets of videos. The last line of the output is the result as JSON,
which is also in result.json of the run folder.
"""

from zoo.train.denoising.run import DiffusionRun, DryDiffusionRun
from zoo.train.denoising.settings import DiffusionSettings
from zoo.train.dry_run import run_command
from zoo.train.metrics_log import Row

USAGE = "usage: zoo finetune-diffusion [--dry-run] [CONFIG.yaml] [section.key=value ...]"


def main(words: list[str]) -> Row:
    """Train from command-line arguments. Returns the result (validation losses); raises ValueError."""
    return run_command(words, __doc__, USAGE, DiffusionSettings, (DiffusionRun, DryDiffusionRun))
