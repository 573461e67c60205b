"""Train a diffusion transformer on images or videos, from scratch or from a softmax checkpoint, with any mixer.

    zoo finetune-diffusion configs/dit/digits.yaml
    zoo finetune-diffusion configs/dit/digits_finetune.yaml model.checkpoint=runs/digits_dit model.mixer=multipole
    zoo finetune-diffusion video/moving_digits
    accelerate launch -m zoo.cli finetune-diffusion t2i/pixart_sigma data.train=LATENTS data.val=LATENTS
    accelerate launch -m zoo.cli finetune-diffusion video/wan_1.3b_hybrid data.train=LATENTS data.val=LATENTS

The data are pixels (small images or videos with class labels) or latents of zoo extract-latents (labels, or prompts for
text-conditional models). Several processes: start it with `accelerate launch` (DDP, FSDP2 or DeepSpeed, see
configs/accelerate) or `torchrun`. Resume an interrupted run with run.resume=true; `--dry-run` does one step of
everything in a folder of its own. The run folder also gets samples (videos as mp4 and contact sheets). The last line of
the output is the result as JSON, also in result.json of the run folder.
"""

from zoo.train.denoising.dry_run import carry_out
from zoo.train.metrics_log import Row

USAGE = "usage: zoo finetune-diffusion [--dry-run] [CONFIG.yaml] [section.key=value ...]"


def main(words: list[str]) -> Row:
    """Train as the command line says. Returns the result (validation losses); raises ValueError."""
    return carry_out(words, __doc__, USAGE)
