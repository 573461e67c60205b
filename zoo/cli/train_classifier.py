"""Train or fine-tune an image classifier with softmax or any mixer.

    zoo train-classifier configs/vit/digits_softmax.yaml
    zoo train-classifier configs/vit/digits_finetune.yaml model.checkpoint=runs/digits_softmax model.mixer=mhla
    accelerate launch -m zoo.cli train-classifier configs/vit/imagenet_deit_small.yaml data.train=TRAIN data.val=VAL

For several processes, start the command with `accelerate launch` (DDP, FSDP2 or DeepSpeed, see configs/accelerate) or
`torchrun`. Resume an interrupted run with run.resume=true. The last line of the output is the result as JSON, which is
also in result.json of the run folder.
"""

import json

from zoo import config
from zoo.train.classification import ClassificationRun
from zoo.train.distributed import destroy_process_group
from zoo.train.metrics_log import Row
from zoo.train.settings import TrainSettings

USAGE = "usage: zoo train-classifier [CONFIG.yaml] [section.key=value ...]"


def main(words: list[str]) -> Row:
    """Train from command-line arguments. Returns the result (top-1 and top-5 in percent); raises ValueError."""
    if config.print_help_if_asked(words, __doc__, USAGE, TrainSettings):
        return {}
    result = ClassificationRun(config.from_command_line(TrainSettings, words)).train()
    destroy_process_group()
    if result:
        print(json.dumps(result), flush=True)
    return result
