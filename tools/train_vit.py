"""Train a vision transformer, from scratch or from a softmax checkpoint, with any mixer.

    python tools/train_vit.py configs/vit/digits_softmax.yaml
    python tools/train_vit.py configs/vit/digits_finetune.yaml model.checkpoint=runs/digits_softmax model.mixer=ahla
    accelerate launch tools/train_vit.py configs/vit/imagenet_deit_small.yaml data.train=TRAIN data.val=VAL

Several processes: start it with `accelerate launch` or `torchrun`. Continue an interrupted run with run.resume=true.
The last line of the output is the result as JSON, also in result.json of the run folder.
"""

import json
from typing import Any

from zoo import config
from zoo.train.loop import Trainer
from zoo.train.settings import TrainSettings

USAGE = "usage: train_vit.py [CONFIG.yaml] [section.key=value ...]"


def main(words: list[str]) -> dict[str, Any]:
    """Train as the words of the command line say. Returns the result (top-1 and top-5 in percent); raises ValueError."""
    if {"-h", "--help"} & set(words):
        print(f"{__doc__}\n{USAGE}\n{config.describe(TrainSettings)}")
        return {}
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ValueError(f"expected one configuration file and section.key=value words, got {' '.join(files)}")
    settings = config.load(TrainSettings, files[0] if files else None, [word for word in words if "=" in word])
    result = Trainer(settings).train()
    if result:
        print(json.dumps(result), flush=True)
    return result


if __name__ == "__main__":
    config.command_line(main)
