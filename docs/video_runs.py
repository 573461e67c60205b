"""The small video run of measurements.md: softmax on real clips, then its control and its conversions, in one table.

    python docs/video_runs.py VIDEOS [section.key=value for every run]

Every video of the folder is a class: its first three fifths are for training, the rest for validation, both written
small into runs/clips/data. Writes docs/results/video-clips.json, docs/pictures/video-clips.png (generated samples) and
docs/pictures/video-clips-curves.png. Runs lie in runs/clips; those that are finished there are not repeated. The runs
after the first go side by side, which their seconds include.
"""

import shlex
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image

from zoo import config
from zoo.data.video.clips import cover
from zoo.data.video.files import VIDEO_FILES, read_video, video_info, write_video
from zoo.io import result_file, write_json
from zoo.plotting import legend_below, plain_axes, pyplot, save_figure
from zoo.train.denoising.run import DiffusionRun
from zoo.train.denoising.settings import DiffusionSettings
from zoo.train.metrics_log import read_rows

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))  # where the benchmarks are

from benchmarks.quality import quality_row  # noqa: E402

RUNS = Path("runs/clips")
SIZE, SHARE = (96, 160), 3 / 5  # pixels of the cut videos, and the part of each for training
KINDS = {  # name -> words of the fine-tuning
    "control": ["model.mixer=", "distill.teacher="],
    "ahla every:3": ["model.mixer=ahla", "model.keep_softmax=every:3"],
    "ahla": ["model.mixer=ahla", "model.keep_softmax=[]"],
    "la": ["model.mixer=la", "model.keep_softmax=[]"],
    "mhla": ["model.mixer=mhla", "model.keep_softmax=[]"],
    "multipole 1/8": ["model.mixer=multipole", "model.keep_softmax=[]"],
    "multipole 1/16": ["model.mixer=multipole", "model.mixer_options={density: 0.0625}", "model.keep_softmax=[]"],
}


def cut(videos: Path) -> list[str]:
    """The words that name the folders of training and validation videos, made out of `videos` where missing."""
    folders = {part: RUNS / "data" / part for part in ("train", "val")}
    for file in sorted(p for p in videos.iterdir() if p.suffix.lower() in VIDEO_FILES):
        parts = {part: folder / file.stem / f"{file.stem}.mp4" for part, folder in folders.items()}
        if all(part.is_file() for part in parts.values()):
            continue
        frames = cover(read_video(file), *SIZE).permute(1, 2, 3, 0).numpy()
        middle = round(len(frames) * SHARE)
        write_video(frames[:middle], parts["train"], video_info(file).fps)
        write_video(frames[middle:], parts["val"], video_info(file).fps)
    return [f"data.{part}={folder}" for part, folder in folders.items()]


def train(name: str, file: str, words: list[str]) -> dict:
    """The result of a run, carried out or what is left of it."""
    folder = RUNS / name.translate(str.maketrans(" /", "__", ":"))
    if (folder / "result.json").is_file():
        return config.yaml.safe_load((folder / "result.json").read_text()) | {"folder": folder}
    settings = config.load(DiffusionSettings, ROOT / "configs" / "video" / file, [f"run.folder={folder}", *words])
    return DiffusionRun(settings).train() | {"folder": folder}


def rows_of(name: str, result: dict) -> list[dict]:
    """Rows of the table: the mean loss of the last fifth of the steps, and the validation loss of the average of the
    weights."""
    logged = read_rows(result["folder"] / "metrics.jsonl")
    last = [row["loss"] for row in logged if row["kind"] == "train" and row["step"] > 0.8 * result["step"]]
    source = {"softmax": "scratch", "control": "control"}.get(name, "converted")
    mixer = "softmax" if source != "converted" else name
    budget = f"{result['step']} steps"
    made = quality_row("clips", "video-clips", mixer, {}, source, 0, 0.0, budget, result["seconds"])
    values = {"training loss": statistics.mean(last), "validation loss": result["ema_val_loss"]}
    return [made | {"metric": metric, "value": round(value, 4)} for metric, value in values.items()]


def draw(results: dict[str, dict], file: Path) -> None:
    """The samples of every run, a contact sheet each."""
    plt = pyplot()
    figure, panels = plt.subplots(-(-len(results) // 2), 2, figsize=(11, 7), layout="constrained")
    for axes in panels.flat:
        axes.axis("off")
    for axes, (name, result) in zip(panels.flat, results.items(), strict=False):
        sheet = sorted((result["folder"] / "samples").glob("*.png"))[-1]
        axes.imshow(np.asarray(Image.open(sheet)))
        axes.set_title(f"{name}, validation loss {result['ema_val_loss']:.3f}", fontsize=9)
    save_figure(figure, file, dpi=120)
    Image.open(file).convert("RGB").quantize(256).save(file, optimize=True)  # a third of the bytes


def draw_losses(results: dict[str, dict], file: Path) -> None:
    """Left the losses of softmax from scratch, right the validation losses of what was made of it."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for name, result in results.items():
        logged = read_rows(result["folder"] / "metrics.jsonl")
        train, found = ([row for row in logged if row["kind"] == kind] for kind in ("train", "eval"))
        if name == "softmax":
            left.plot([r["step"] for r in train], [r["loss"] for r in train], label="training")
        axes, label = (left, "validation") if name == "softmax" else (right, name)
        axes.plot([r["step"] for r in found], [r["ema_val_loss"] for r in found], label=label, marker=".")
    right.axhline(results["softmax"]["ema_val_loss"], color="grey", linestyle=":", label="softmax before")
    for axes, title in ((left, "softmax from scratch: loss"), (right, "fine-tuned: validation loss")):
        axes.set(xlabel="steps", ylabel=title, yscale="log")
        plain_axes(axes)
        legend_below(axes, 3)
    save_figure(figure, file, dpi=120)


def main(words: list[str]) -> None:
    """Run what is missing and write the table and the pictures."""
    videos, *more = words
    shared = [*cut(Path(videos)), *more]
    results = {"softmax": train("softmax", "clips.yaml", shared)}
    with ProcessPoolExecutor(len(KINDS), get_context("spawn")) as pool:
        runs = {k: pool.submit(train, k, "clips_finetune.yaml", [*shared, *own]) for k, own in KINDS.items()}
        results |= {name: run.result() for name, run in runs.items()}
    command = " ".join(["python docs/video_runs.py VIDEOS", shlex.join(more)]).strip()
    rows = [row for name, result in results.items() for row in rows_of(name, result)]
    write_json(result_file(command, rows), ROOT / "docs" / "results" / "video-clips.json")
    draw(results, ROOT / "docs" / "pictures" / "video-clips.png")
    draw_losses(results, ROOT / "docs" / "pictures" / "video-clips-curves.png")


if __name__ == "__main__":
    main(sys.argv[1:])
