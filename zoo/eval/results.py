"""Result files: timm-style CSV rows and per-image predictions."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from zoo.data.transforms import InputSpec
from zoo.eval.accuracy import Predictions
from zoo.files import replacing
from zoo.models.checkpoint_tags import sites_of

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
    with replacing(file) as temporary, temporary.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, columns)
        writer.writeheader()
        writer.writerows(rows)


def write_predictions(found: dict[str, Predictions], names: list[str], file: Path) -> None:
    """One line an image: name, label, and for each model its five classes. Every model has seen the same images."""
    first = next(iter(found.values()))
    with replacing(file) as temporary, temporary.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(
            ["image", "label", *(f"{model}_top{k + 1}" for model in found for k in range(first.top.shape[1]))]
        )
        tops = np.concatenate([p.top for p in found.values()], axis=1)
        for name, label, top in zip(names, first.labels, tops, strict=True):
            writer.writerow([name, label, *top])
