"""Result files: timm-style CSV rows, per-image predictions, and rows of docs/results/quality.json."""

import csv
import datetime
import json
import os
import platform
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import nn

from zoo.backbones.checkpoints import sites_of
from zoo.data.transforms import InputSpec
from zoo.eval.accuracy import Predictions
from zoo.files import replacing

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


def merge_results(files: list[Path]) -> dict[str, Any]:
    """One result file out of several that were written by runs of the same command with other words.

    Rows keep their order; a run that is in two files counts once. Raises ValueError when a file is missing or damaged,
    when two files give one run another result, or come from different hardware or versions.
    """
    results = [_read_result(file) for file in files]
    first, rows = results[0], dict[str, dict[str, Any]]()
    for file, result in zip(files, results, strict=True):
        for key in ("hardware", "versions"):
            if result[key] != first[key]:
                raise ValueError(f"{file} and {files[0]} cannot be one table: their {key} differ")
        for row in result["rows"]:
            run = json.dumps({k: v for k, v in row.items() if k not in ("value", "wall_s")}, sort_keys=True)
            if rows.setdefault(run, row)["value"] != row["value"]:
                raise ValueError(f"{file} and a file before it give different results for the run {run}")
    command = _common_command([result["command"] for result in results])
    date = max(result["date"] for result in results)
    return {**first, "command": command, "date": date, "rows": list(rows.values())}


def _read_result(file: Path) -> dict[str, Any]:
    try:
        result = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"there is no result file {file}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"the result file {file} is damaged: {error}") from error
    keys, rows = ("command", "date", "hardware", "versions", "rows"), []
    if isinstance(result, dict) and all(key in result for key in keys):
        rows = result["rows"]
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "value" in row for row in rows) or not rows:
        raise ValueError(f"{file} is no table of quality: it needs {', '.join(keys)}, and rows with a value")
    return result


def _common_command(commands: list[str]) -> str:
    """Commands that differ in the values of some words as one, with those values as alternatives: seeds=[0]|[1]."""
    split = [shlex.split(command) for command in dict.fromkeys(commands)]
    keys = {tuple(word.partition("=")[0] for word in words) for words in split}
    if len(keys) > 1:
        return "; ".join(dict.fromkeys(commands))
    words = []
    for column in zip(*split, strict=True):
        key, equals, _ = column[0].partition("=")
        words.append(key + equals + "|".join(dict.fromkeys(word.partition("=")[2] for word in column)))
    return shlex.join(words)


def write_json(content: Any, file: Path) -> None:
    """Write JSON, indented, making the folder if needed; the file is complete or as it was."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
