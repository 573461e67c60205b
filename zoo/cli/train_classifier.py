"""Train or fine-tune an image classifier with softmax or any mixer.

    zoo train-classifier vit/digits_softmax
    zoo train-classifier vit/digits_finetune model.checkpoint=runs/digits_softmax model.mixer=mhla
    accelerate launch -m zoo.cli train-classifier vit/imagenet_deit_small data.train=TRAIN data.val=VAL

For several processes, start the command with `accelerate launch` (DDP, FSDP2 or DeepSpeed, see configs/accelerate) or
`torchrun`. Resume an interrupted run with run.resume=true. `--dry-run` does every part of a run once, with a small
batch on a CPU, in a separate folder. The last line of the output is the result as JSON, which is also in result.json of
the run folder.
"""

from zoo.train.classification import ClassificationRun, DryClassificationRun
from zoo.train.dry_run import run_command
from zoo.train.metrics_log import Row
from zoo.train.settings import TrainSettings

USAGE = "usage: zoo train-classifier [--dry-run] [CONFIG.yaml] [section.key=value ...]"


def main(words: list[str]) -> Row:
    """Train from command-line arguments. Returns the result (top-1 and top-5 in percent); raises ValueError."""
    return run_command(words, __doc__, USAGE, TrainSettings, (ClassificationRun, DryClassificationRun))
