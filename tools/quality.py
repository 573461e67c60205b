"""A quality table: the same run for several mixers and seeds, from scratch and, if asked, converted from the softmax
run.

    python tools/quality.py configs/vit/cifar10.yaml data.train=TRAIN.parquet data.val=TEST.parquet \\
        mixers=[softmax,la,ahla,hla2] finetune=configs/vit/cifar10_finetune.yaml out=runs/cifar10
        json=docs/results/quality.json

Words with a dot are those of train_vit.py and go into every run. A table that is interrupted continues where it was.
Several processes may share the work, each with its own json; `quality.py merge=[A.json,B.json] json=ALL.json` joins
them. Conversions start from the softmax run of their seed in `out`, which must be there.
"""

import shlex
from pathlib import Path
from typing import Any

import train_vit

from zoo import config
from zoo.eval.results import merge_results, quality_row, result_file, write_json
from zoo.eval.settings import QualitySettings
from zoo.train.settings import TrainSettings

USAGE = "usage: quality.py CONFIG.yaml mixers=[A,B] [key=value ...] [section.key=value ...]"
PRIVATE = ("data.train=", "data.val=", "json=")  # where a user keeps things is not part of a result


def main(words: list[str]) -> dict[str, Any]:
    """Run what is missing of the table. Returns the content of the file; raises ValueError."""
    if config.wants_help(words, __doc__, USAGE, QualitySettings):
        return {}
    own = [word for word in words if "=" in word and "." not in word.partition("=")[0]]
    settings, shared = config.from_command_line(QualitySettings, own), [word for word in words if word not in own]
    if settings.merge:
        result = merge_results([Path(file) for file in settings.merge])
        write_json(result, Path(settings.json))
        return result
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
