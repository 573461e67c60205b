"""A quality table: the same run for several mixers and seeds, from scratch and, if asked, converted from the softmax
run.

    python tools/quality.py configs/vit/cifar10.yaml data.train=TRAIN.parquet data.val=TEST.parquet \\
        mixers=[softmax,la,ahla,hla2] finetune=configs/vit/cifar10_finetune.yaml out=runs/cifar10
        json=docs/results/quality.json

Words with a dot are those of train_vit.py and go into every run. A table that is interrupted continues where it was.
"""

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import train_vit

from zoo import config
from zoo.eval.results import quality_row, result_file, write_json
from zoo.train.settings import TrainSettings

USAGE = "usage: quality.py CONFIG.yaml mixers=[A,B] [key=value ...] [section.key=value ...]"
PRIVATE = ("data.train=", "data.val=")  # where a user keeps data is not part of a result


@dataclass(frozen=True)
class QualitySettings:
    """Which runs make the table.

    mixers: mixers to train from scratch (softmax first: it is the control, and the source of conversions)
    seeds: seeds of every run
    finetune: configuration of the fine-tuning of converted models; empty for none
    data: name of the data in the table; empty takes the name of the configuration
    out: folder of the runs
    json: file to write the table to
    """

    mixers: list[str] = field(default_factory=lambda: ["softmax", "la", "ahla", "hla2"])
    seeds: list[int] = field(default_factory=lambda: [0])
    finetune: str = ""
    data: str = ""
    out: str = "runs/quality"
    json: str = "runs/quality/quality.json"


def main(words: list[str]) -> dict[str, Any]:
    """Run what is missing of the table. Returns the content of the file; raises ValueError."""
    if config.wants_help(words, __doc__, USAGE, QualitySettings):
        return {}
    own = [word for word in words if "=" in word and "." not in word.partition("=")[0]]
    settings, shared = config.from_command_line(QualitySettings, own), [word for word in words if word not in own]
    files = [word for word in shared if "=" not in word]
    if len(files) != 1:
        raise ValueError(f"expected one configuration file, got {files}")
    data, rows = settings.data or Path(files[0]).stem, []
    overrides = [word for word in shared if "=" in word]

    def run(file: str, source: str, mixer: str, seed: int, *more: str) -> None:
        folder = f"{settings.out}/{source}_{mixer}_{seed}"
        changes = [f"run.folder={folder}", "run.resume=true", f"run.seed={seed}", *overrides, *more]
        result = train_vit.main([file, f"model.mixer={'' if mixer == 'softmax' else mixer}", *changes])
        if result:
            budget, took = f"{result['epoch']:.0f} epochs", result["seconds"]
            options = config.load(TrainSettings, Path(folder) / "config.yaml").model.mixer_options
            row = (Path(file).stem, data, mixer, options, source, seed, result["top1"], budget, took)
            rows.append(quality_row(*row))
            write_json(result_file(command, rows), Path(settings.json))

    command = "python tools/quality.py " + shlex.join(w for w in words if not w.startswith(PRIVATE))
    for seed in settings.seeds:
        for mixer in settings.mixers:
            run(files[0], "scratch", mixer, seed)
        for mixer in settings.mixers if settings.finetune else []:
            kind = "control" if mixer == "softmax" else "converted"
            run(settings.finetune, kind, mixer, seed, f"model.checkpoint={settings.out}/scratch_softmax_{seed}")
    return result_file(command, rows)


if __name__ == "__main__":
    config.command_line(main)
