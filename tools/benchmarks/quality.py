"""Quality table: mixers trained from scratch, or converted by a recipe from softmax runs."""

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import arm, common_command
from zoo import config
from zoo.data import share_data
from zoo.io import result_file, write_json
from zoo.ranges import SEED, check_ranges
from zoo.recipes.settings import RecipeSettings
from zoo.recipes.stages import run_recipe
from zoo.train.classification import ClassificationRun
from zoo.train.settings import TrainSettings

Row = dict[str, Any]
STAGES = {  # stage of a recipe -> (source, metric) of its row
    "source": ("teacher", "top1"),
    "converted": ("converted", "top1 after conversion"),
    "calibrated": ("converted", "top1 after calibration"),
    "transfer": ("converted", "top1 after transfer"),
    "finetune": ("converted", "top1"),
    "control": ("control", "top1"),
    "floor": ("floor", "top1"),
}


@dataclass(frozen=True)
class QualitySettings:
    """Runs of the table.

    mixers: mixers, each with its options, such as "mhla mixing=project depthwise=v" (with a recipe, softmax is the
      source)
    seeds: seeds of every run
    recipe: recipe that converts the softmax run of each seed to the mixers; empty to train from scratch
    data: name of the data in the table; empty takes the name of the configuration
    out: folder of the runs
    json: result file to write
    merge: result files to join into `json`, instead of running
    """

    mixers: list[str] = field(default_factory=lambda: ["softmax", "la", "mhla", "multipole"])
    seeds: list[int] = field(default_factory=lambda: [0])
    recipe: str = ""
    data: str = ""
    out: str = "runs/quality"
    json: str = "runs/quality/quality.json"
    merge: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_ranges("", self, seeds=SEED)
        for mixer in self.mixers:
            arm(mixer)


def quality(words: list[str]) -> dict[str, Any]:
    """Run missing entries of a table, or join tables. Returns the content of the result file. Raises ValueError."""
    own = [word for word in words if "=" in word and "." not in word.partition("=")[0]]
    settings, shared = config.from_command_line(QualitySettings, own), [word for word in words if word not in own]
    if settings.merge:
        write_json(result := merge_results([Path(file) for file in settings.merge]), Path(settings.json))
        return result
    if len(files := [word for word in shared if "=" not in word]) != 1:
        raise ValueError(f"expected one configuration file, got {files}")
    command = "python tools/benchmark.py quality " + shlex.join(
        w for w in words if not w.startswith(("data.train=", "data.val=", "json="))
    )
    return quality_table(settings, files[0], [word for word in shared if "=" in word], command)


def quality_table(settings: QualitySettings, file: str, changes: list[str], command: str) -> dict[str, Any]:
    """Run missing entries of a table, seed by seed, and write the result file after each run.

    file: configuration of runs from scratch. changes: arguments of every run. Conversions start from the softmax runs
    in `settings.out`. Raises ValueError if they are missing.
    """
    rows: list[Row] = []
    runs = _conversions if settings.recipe else _from_scratch
    with share_data():
        for seed, mixer in itertools.product(settings.seeds, settings.mixers):
            torch.compiler.reset()  # the number of compilations per class is limited
            rows += runs(settings, file, changes, mixer, seed)
            write_json(result_file(command, rows), Path(settings.json))
    return result_file(command, rows)


def folder(out: str, mixer: str, seed: int) -> str:
    """Return the run folder of a mixer with its options."""
    return f"{out}/{re.sub(r'[^a-z0-9]+', '_', mixer.lower())}_{seed}"


def _from_scratch(settings: QualitySettings, file: str, changes: list[str], mixer: str, seed: int) -> Iterator[Row]:
    name, options = arm(mixer)
    own = ["model.mixer=" + ("" if mixer == "softmax" else name)]
    own += [f"model.mixer_options={json.dumps(options)}"] if options else []
    run = [f"run.folder={folder(settings.out, mixer, seed)}", "run.resume=true", f"run.seed={seed}"]
    run_settings = config.load(TrainSettings, file, [*own, *changes, *run])
    options = run_settings.model.mixer_options  # includes the options in `changes`
    result = ClassificationRun(run_settings).train()
    if result:
        about = *_about(settings, file, file, run_settings), name, options, "scratch", seed
        yield quality_row(*about, result["top1"], f"{result['epoch']:.0f} epochs", result["seconds"])


def _conversions(settings: QualitySettings, file: str, changes: list[str], mixer: str, seed: int) -> Iterator[Row]:
    name, options = arm(mixer)
    keep = options.pop("keep_softmax", [])
    own = {
        "source": folder(settings.out, "softmax", seed), "mixer": name, "mixer_options": options,
        "keep_softmax": keep, "out": folder(f"{settings.out}/{Path(settings.recipe).stem}", mixer, seed),
    }  # fmt: skip
    given = config.load(RecipeSettings, settings.recipe)
    more = {"changes": [*given.changes, *changes, f"run.seed={seed}"], **own}
    recipe = config.from_tree(RecipeSettings, {**config.to_tree(given), **more})  # without the options of another mixer
    found = run_recipe(recipe)
    shown = {**options, **({"keep_softmax": keep} if keep else {})}
    tuning = config.load(TrainSettings, recipe.finetune, recipe.changes)
    about = _about(settings, settings.recipe, file, tuning)
    for row in found["evaluate"]["rows"]:
        source, metric = STAGES[row["model"]]
        ours = ("softmax", dict[str, Any]()) if source in ("teacher", "control") else (name, shown)
        epochs = tuning.schedule.epochs if metric == "top1" and source != "teacher" else 0
        budget, seconds = f"{epochs} epochs", _seconds(found, row["model"])
        yield quality_row(*about, *ours, source, seed, row["value"], budget, seconds) | {"metric": metric}


def _about(settings: QualitySettings, experiment: str, file: str, run: TrainSettings) -> tuple[str, str]:
    """Return the names of the experiment and the data, with a note if images are held out."""
    data, holdout = settings.data or Path(file).stem, run.data.holdout
    return Path(experiment).stem, f"{data}, {holdout} held out" if holdout else data


def _seconds(found: dict[str, Any], model: str) -> float:
    """Return the training time of a model, including layer-wise distillation."""
    if model in ("control", "floor"):
        return found["controls"][model]["seconds"]
    stages = {"transfer": ["transfer"], "finetune": ["transfer", "finetune"]}.get(model, [])
    return sum(found[stage].get("result", {"seconds": 0.0})["seconds"] for stage in stages)


# Rows and files


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
    """Return a row of the table. source: scratch, converted, control or teacher. value: top-1 in percent."""
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


def merge_results(files: list[Path]) -> dict[str, Any]:
    """Merge result files of several runs of one command with different arguments.

    Rows keep their order; a run in two files is kept once. Raises ValueError for a missing or damaged file, different
    results of the same run, and different hardware or versions.
    """
    results = [_read_result(file) for file in files]
    first, rows = results[0], dict[str, dict[str, Any]]()
    for file, result in zip(files, results, strict=True):
        for key in ("hardware", "versions"):
            if result[key] != first[key]:
                raise ValueError(f"{file} and {files[0]} cannot be merged: their {key} differ")
        for row in result["rows"]:
            run = json.dumps({k: v for k, v in row.items() if k not in ("value", "wall_s")}, sort_keys=True)
            if rows.setdefault(run, row)["value"] != row["value"]:
                raise ValueError(f"{file} and a file before it give different results for the run {run}")
    command = common_command([result["command"] for result in results])
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
        raise ValueError(f"{file} is not a quality table: it needs {', '.join(keys)}, and rows with a value")
    return result
