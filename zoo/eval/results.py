"""Result files: timm-style CSV rows, per-image predictions, and rows of docs/results/quality.json."""

import csv
import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import nn

from zoo.backbones.checkpoints import sites_of
from zoo.data.transforms import InputSpec
from zoo.eval.accuracy import Predictions
from zoo.train.record import replacing

CSV_COLUMNS = (
    "model",
    "img_size",
    "top1",
    "top1_err",
    "top5",
    "top5_err",
    "param_count",
    "crop_pct",
    "interpolation",
    "mixer",
    "images",
    "unreadable",
)


def csv_row(name: str, model: nn.Module, spec: InputSpec, found: Predictions) -> dict[str, Any]:
    """The columns of timm's results files (accuracies in percent, param_count in millions), and the mixer."""
    summary = found.summary()
    return {
        "model": name,
        "img_size": spec.size[-1],
        "top1": round(summary["top1"], 3),
        "top1_err": round(100 - summary["top1"], 3),
        "top5": round(summary["top5"], 3),
        "top5_err": round(100 - summary["top5"], 3),
        "param_count": round(sum(p.numel() for p in model.parameters()) / 1e6, 2),
        "crop_pct": spec.crop_pct,
        "interpolation": spec.interpolation,
        "mixer": "+".join(sorted({site.mixer_name for _, site in sites_of(model)})) or "softmax",
        "images": int(summary["images"]),
        "unreadable": int(summary["unreadable"]),
    }


def write_csv(rows: list[dict[str, Any]], file: Path) -> None:
    """Write rows under the header of `CSV_COLUMNS`; further keys become further columns."""
    columns = [*CSV_COLUMNS, *(k for k in rows[0] if k not in CSV_COLUMNS)]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, columns)
        writer.writeheader()
        writer.writerows(rows)


def write_predictions(found: dict[str, Predictions], names: list[str], file: Path) -> None:
    """One line an image: name, label, and for each model its five classes. Every model has seen the same images."""
    first = next(iter(found.values()))
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(
            ["image", "label", *(f"{model}_top{k + 1}" for model in found for k in range(first.top.shape[1]))]
        )
        tops = np.concatenate([p.top for p in found.values()], axis=1)
        for name, label, top in zip(names, first.labels, tops, strict=True):
            writer.writerow([name, label, *top])


def quality_row(
    experiment: str,
    data: str,
    mixer: str,
    options: dict[str, Any],
    source: str,
    seed: int,
    value: float,
    budget: str,
    wall_s: float,
) -> dict[str, Any]:
    """A row of docs/results/quality.json. source: scratch, converted, control or teacher; value: top-1 in percent."""
    return {
        "experiment": experiment,
        "data": data,
        "mixer": mixer or "softmax",
        "options": options,
        "source": source,
        "seed": seed,
        "metric": "top1",
        "value": round(value, 2),
        "budget": budget,
        "wall_s": round(wall_s, 1),
    }


def result_file(command: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of a file of docs/results: the rows with the command, date, hardware and versions that made them."""
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__}
    today = datetime.date.today().isoformat()
    return {"command": command, "date": today, "hardware": hardware, "versions": versions, "rows": rows}


def write_json(content: Any, file: Path) -> None:
    """Write JSON, indented, making the folder if needed; the file is complete or as it was."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
