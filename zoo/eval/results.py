"""Result files of an evaluation: results in timm's CSV format, and predictions per image."""

from pathlib import Path

import numpy as np
from torch import nn

from zoo.data.transforms import InputSpec
from zoo.eval.accuracy import Predictions
from zoo.io import write_csv
from zoo.models.checkpoint_tags import sites_of

ResultRow = dict[str, str | float | int]


def csv_row(name: str, model: nn.Module, spec: InputSpec, found: Predictions) -> ResultRow:
    """Make a row with the columns of timm's results files (accuracies in percent, parameters in millions), and the
    mixer."""
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


def write_results(rows: list[ResultRow], file: Path) -> None:
    """Write rows, with a column "model", as CSV. All must have the same keys."""
    write_csv(list(rows[0]) if rows else ["model"], [list(row.values()) for row in rows], file)


def write_predictions(found: dict[str, Predictions], names: list[str], file: Path) -> None:
    """Write one line per image: name, label, and the top five classes of each model. All models must have the same
    images."""
    first = next(iter(found.values()))
    head = ["image", "label", *(f"{model}_top{k + 1}" for model in found for k in range(first.top.shape[1]))]
    tops = np.concatenate([p.top for p in found.values()], axis=1)
    rows = [[name, label, *top] for name, label, top in zip(names, first.labels, tops, strict=True)]
    write_csv(head, rows, file)
