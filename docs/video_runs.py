"""The small video run of the README: softmax on real clips, then its control and its conversions, in one table.

    python docs/video_runs.py CLIPS/train CLIPS/val [section.key=value for every run]

Each folder has a sub-folder of mp4 files a class. Writes docs/results/video-clips.json, docs/video-clips.png (generated
samples) and docs/video-clips-curves.png. Runs lie in runs/clips; those that are finished there are not repeated.
"""

import shlex
import sys
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image

from zoo import config
from zoo.eval.results import quality_row, result_file, write_json
from zoo.train.diffusion.loop import DiffusionRun
from zoo.train.diffusion.settings import DiffusionSettings
from zoo.train.record import draw_curves, read_rows

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path("runs/clips")
BLOCKS = "model.mixer_options={blocks: [2, 2, 3]}"
KINDS = {  # name -> words of the fine-tuning
    "control": ["model.mixer=", "distill.teacher="],
    "ahla every:3": ["model.mixer=ahla", "model.keep_softmax=every:3"],
    "ahla": ["model.mixer=ahla"],
    "la": ["model.mixer=la"],
    "mhla": ["model.mixer=mhla", BLOCKS],
}


def train(name: str, file: str, words: list[str]) -> dict:
    """The result of a run, carried out or what is left of it."""
    folder = RUNS / name.replace(" ", "_").replace(":", "")
    if (folder / "result.json").is_file():
        return config.yaml.safe_load((folder / "result.json").read_text()) | {"folder": folder}
    settings = config.load(DiffusionSettings, ROOT / "configs" / "video" / file, [f"run.folder={folder}", *words])
    return DiffusionRun(settings).train() | {"folder": folder}


def row(name: str, result: dict) -> dict:
    """A row of the table: the validation loss of the average of the weights."""
    source = {"softmax": "scratch", "control": "control"}.get(name, "converted")
    mixer = "softmax" if source != "converted" else name
    budget = f"{result['step']} steps"
    made = quality_row("clips", "video-clips", mixer, {}, source, 0, 0.0, budget, result["seconds"])
    return made | {"metric": "validation loss", "value": round(result["ema_val_loss"], 4)}


def draw(results: dict[str, dict], file: Path) -> None:
    """The samples of every run, a contact sheet each."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(-(-len(results) // 2), 2, figsize=(11, 5), layout="constrained")
    for axes in panels.flat:
        axes.axis("off")
    for axes, (name, result) in zip(panels.flat, results.items(), strict=False):
        sheet = sorted((result["folder"] / "samples").glob("*.png"))[-1]
        axes.imshow(np.asarray(Image.open(sheet)))
        axes.set_title(f"{name}, validation loss {result['ema_val_loss']:.3f}", fontsize=9)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main(words: list[str]) -> None:
    """Run what is missing and write the table and the pictures."""
    train_folder, val_folder, *more = words
    shared = [f"data.train={train_folder}", f"data.val={val_folder}", *more]
    results = {"softmax": train("softmax", "clips.yaml", shared)}
    command = "python docs/video_runs.py CLIPS/train CLIPS/val " + shlex.join(more)
    for name, own in KINDS.items():
        results[name] = train(name, "clips_finetune.yaml", [*shared, *own])
        rows = [row(kind, result) for kind, result in results.items()]
        write_json(result_file(command.strip(), rows), ROOT / "docs" / "results" / "video-clips.json")
    draw(results, ROOT / "docs" / "video-clips.png")
    tuned = {name: read_rows(result["folder"] / "metrics.jsonl") for name, result in results.items() if name in KINDS}
    draw_curves(tuned, ROOT / "docs" / "video-clips-curves.png", "ema_val_loss", "validation loss")


if __name__ == "__main__":
    main(sys.argv[1:])
