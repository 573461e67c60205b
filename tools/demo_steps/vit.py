"""Classification part of the demo: commands, report lines and figure."""

from pathlib import Path
from typing import Any

import numpy as np

from demo_steps.experiment_plot import Panel, draw_experiment
from demo_steps.processes import Command, to_mixer
from zoo.config import one_of
from zoo.data import open_source
from zoo.data.settings import DataSettings
from zoo.data.transforms import InputSpec, eval_transform
from zoo.eval.attention import attention_matrix
from zoo.mixers import MIXERS
from zoo.models.timm.model_files import load_model
from zoo.train.metrics_log import read_rows

LAYER, HEAD, IMAGE = 1, 0, 3  # of the attention maps in the figure


def vit_commands(out: Path, configs: Path, mixers: list[str], epochs: int) -> list[Command]:
    """Return (tool, arguments) of training a softmax ViT for `epochs`, its conversions and their fine-tuning.

    Raises ValueError for an unknown mixer.
    """
    for mixer in mixers:
        one_of("mixer", mixer, tuple(MIXERS))
    source, short = f"model.checkpoint={out}/softmax", max(1, epochs // 10)
    first = [f"{configs}/vit/digits_softmax.yaml", f"run.folder={out}/softmax", *_length(epochs)]
    commands = [("train_vit", [*first, f"run.eval_epochs={max(1, epochs // 6)}"])]
    for mixer in mixers:
        commands.append(("convert", [source, *to_mixer(mixer), f"out={out}/{mixer}_zero_shot"]))
    for mixer, name in [("", "softmax_more"), *((mixer, mixer) for mixer in mixers)]:
        words = [source, *to_mixer(mixer), f"run.folder={out}/{name}", *_length(short)]
        commands.append(("train_vit", [f"{configs}/vit/digits_finetune.yaml", *words]))
    return commands


def _length(epochs: int) -> list[str]:
    return [f"schedule.epochs={epochs}", f"schedule.warmup_epochs={epochs / 10}"]


def vit_lines(folder: Path, mixers: list[str], rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of the report. rows: evaluation results by run folder."""
    lines = [
        "## A classifier, converted",
        "",
        "A softmax ViT was trained, converted, and fine-tuned for a tenth of the budget.",
        f"Top-1 accuracy on {rows['softmax']['images']} held-out images, and the difference to the source in points,",
        "with its paired 95 % interval.",
        "",
        "| model | images seen | top-1 (%) | difference to the source |",
        "| --- | --- | --- | --- |",
        _line("softmax (source)", rows["softmax"], _seen(folder, "softmax")),
        _line("softmax, trained further (control)", rows["softmax_more"], _seen(folder, "softmax", "softmax_more")),
    ]
    for mixer in mixers:
        lines.append(_line(f"{mixer}, zero-shot", rows[f"{mixer}_zero_shot"], _seen(folder, "softmax")))
        lines.append(_line(f"{mixer}, fine-tuned", rows[mixer], _seen(folder, "softmax", mixer)))
    return [*lines, "", "![curves, accuracies and attention](demo.png)", "", *_reading(), ""]


def _line(name: str, row: dict[str, Any], seen: int) -> str:
    interval = f"{row['top1_diff']:+.1f} [{row['diff_low']:+.1f}, {row['diff_high']:+.1f}]"
    return f"| {name} | {seen:,} | {row['top1']:.1f} | {interval if row['top1_diff'] else '-'} |"


def _seen(folder: Path, *runs: str) -> int:
    return sum(read_rows(folder / run / "metrics.jsonl")[-1]["images_seen"] for run in runs)


def _reading() -> list[str]:
    return [
        f"Bottom row: weights with which the query token (square) reads the others, in layer {LAYER}, head {HEAD}. For",
        "linear mixers they are a row of the matrix that the mixer applies without forming it. Each map has its own",
        "scale.",
    ]


def draw_vit(folder: Path, mixers: list[str], rows: dict[str, dict[str, Any]]) -> None:
    """Draw demo.png: learning curves, accuracies and attention maps of one query token."""
    top1 = {name: row["top1"] for name, row in rows.items()}
    images, curve = _curve(folder / "softmax")
    maps = {"softmax": _map(folder / "softmax")}
    panels = [Panel("softmax", {"source": top1["softmax"]}, (images, curve), maps)]
    more = _curve(folder / "softmax_more", images[-1], top1["softmax"])
    panels.append(Panel("control", {"softmax": top1["softmax_more"]}, more))
    for mixer in mixers:
        before = f"{mixer}_zero_shot"
        bars = {"zero-shot": top1[before], "fine-tuned": top1[mixer]}
        maps = {f"{mixer}, zero-shot": _map(folder / before), f"{mixer}, fine-tuned": _map(folder / mixer)}
        panels.append(Panel(mixer, bars, _curve(folder / mixer, images[-1], top1[before]), maps))
    picture, query = _image()
    draw_experiment(panels, picture, query, "A softmax ViT, converted and fine-tuned (digits)", folder / "demo.png")


def _curve(run: Path, after: float = 0, first: float | None = None) -> tuple[list[float], list[float]]:
    """Return (images seen, top-1), starting with `first` at `after` images."""
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "eval"]
    images, top1 = [after + row["images_seen"] for row in rows], [row["top1"] for row in rows]
    return (images, top1) if first is None else ([after, *images], [first, *top1])


def _image() -> tuple[np.ndarray, tuple[int, int]]:
    """Return the image of the figure and its query token: the brightest pixel nearest to the centre."""
    picture = np.asarray(open_source("digits", "", train=False).read(IMAGE)[0].convert("L"))
    middle = np.array(picture.shape) / 2 - 0.5
    bright = np.argwhere(picture > picture.max() * 0.75)
    row, column = bright[np.abs(bright - middle).sum(1).argmin()]
    return picture, (int(row), int(column))


def _map(run: Path) -> np.ndarray:
    """Return the attention map [8, 8] of the query token."""
    model, recipe = load_model(run)
    spec = InputSpec.from_recipe(recipe.input, DataSettings())
    image = eval_transform(spec)(open_source("digits", "", train=False).read(IMAGE)[0])
    matrix = attention_matrix(model, image, LAYER, HEAD)
    (_, (row, column)), side = _image(), int(matrix.shape[0] ** 0.5)
    return matrix[row * side + column].reshape(side, side).numpy()
