"""Evaluation of several models on the same images, each with its own preprocessing."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import timm
import torch
from torch import nn

from zoo.data import CachedImages, InputSpec, LoadedImages, Source, check_unreadable, open_source, validation_source
from zoo.data.settings import AugmentSettings, DataSettings
from zoo.errors import nearest
from zoo.eval.accuracy import Predictions, predict
from zoo.eval.imagenet_labels import image_number, load_real_labels, numeric_classes, real_accuracy
from zoo.eval.paired import paired_difference
from zoo.eval.results import ResultRow, csv_row
from zoo.eval.settings import EvalSettings
from zoo.models.timm.model_files import Recipe, build_host, load_model, timm_classes
from zoo.precision import autocast
from zoo.progress import progress

LOCAL = "local-dir:"  # timm's prefix of folder names


@dataclass
class Candidate:
    """A model to evaluate.

    name: as given in the settings.  spec: preprocessing of its images.  classes: class names, empty if it stores none.
    """

    name: str
    model: nn.Module
    spec: InputSpec
    num_classes: int
    classes: list[str]


def open_candidate(name: str, data: DataSettings) -> Candidate:
    """Open a model to evaluate.

    name: a run folder, a .safetensors file, a folder of timm's `save_for_hf` (also as local-dir:FOLDER), or the name of
    a timm model with published weights. Raises ValueError for anything else.
    """
    if timm.is_model(name.split(".")[0]) and not Path(name).exists():
        recipe = Recipe(name, num_classes=timm_classes(name))
        model = build_host(recipe, pretrained=True)
        return Candidate(name, model, InputSpec.of(model, None, data), recipe.num_classes, [])
    path = name.removeprefix(LOCAL)
    if not os.path.lexists(path):
        near = nearest(name, timm.list_models(), cutoff=0.8)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no checkpoint {path}, nor a timm model of this name{hint}")
    model, recipe = load_model(path)
    return Candidate(name, model, InputSpec.from_recipe(recipe.input, data), recipe.num_classes, recipe.classes)


def open_validation(data: DataSettings, classes: list[str]) -> Source:
    """Open the validation images.

    Sub-folders are matched by name with `classes`, the class names of the models, if these are known. Sub-folders named
    by numbers (ImageNet-V2) are the classes of these numbers. Raises ValueError for a sub-folder that is none of the
    classes.
    """
    if data.cache or data.holdout:
        return validation_source(data)
    class_map = numeric_classes(data.val) if data.source == "folder" else None
    if data.source == "folder" and classes and os.path.isdir(data.val):
        folders = {entry.name for entry in os.scandir(data.val) if entry.is_dir()}
        if folders <= set(classes):
            class_map = {name: number for number, name in enumerate(classes)}
        elif class_map is None:
            unknown = sorted(folders - set(classes))
            raise ValueError(f"{data.val} has the sub-folder {unknown[0]!r}, which is none of the classes of the model")
    keys = {"image_key": data.image_key, "label_key": data.label_key}
    return open_source(data.source, data.val, train=False, class_map=class_map, **keys)


def open_candidates(settings: EvalSettings) -> tuple[list[Candidate], Source]:
    """Open all models and the images. Raises ValueError for models that do not fit the images or each other."""
    candidates = [open_candidate(name, settings.data) for name in settings.eval.models]
    known = [candidate.classes for candidate in candidates if candidate.classes]
    if any(classes != known[0] for classes in known):
        raise ValueError("the models were trained on different classes, so that they cannot be compared on one set")
    source = open_validation(settings.data, known[0] if known else [])
    for candidate in candidates:
        n = len(source.classes)
        if n > candidate.num_classes or (n < candidate.num_classes and not candidate.classes):
            raise ValueError(f"{candidate.name} has {candidate.num_classes} classes, but the images have {n}")
    return candidates, source


def compare(settings: EvalSettings) -> tuple[list[ResultRow], dict[str, Predictions], list[str]]:
    """Evaluate models on the same images, and compare the other models with the first one.

    Returns (rows of results.csv, predictions by model, names of the images). Raises ValueError for a model with another
    number of classes than the data, and if more than 1 % of the images are unreadable.
    """
    if not settings.eval.models:
        raise ValueError("missing required option eval.models=[RUN_FOLDER_OR_TIMM_NAME, ...]")
    candidates, source = open_candidates(settings)
    which = settings.eval.real_labels
    labels = load_real_labels(None if which == "timm" else which) if which else []
    if labels:
        image_number(source.name(0), len(labels))  # raises an error for other images, before any model is run
    rows: list[ResultRow] = []
    found: dict[str, Predictions] = {}
    for candidate in candidates:
        name = candidate.name
        found[name] = evaluate_candidate(candidate, source, settings)
        row = csv_row(name, candidate.model, candidate.spec, found[name])
        rows.append(row | _extra(found, name, source, labels))
    names = [source.name(int(i)) for i in found[settings.eval.models[0]].index]
    return rows, found, names


def evaluate_candidate(candidate: Candidate, source: Source, settings: EvalSettings) -> Predictions:
    """Compute the predictions of one model for all readable images. Raises ValueError if more than 1 % are
    unreadable."""
    options = settings.eval
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind = CachedImages if settings.data.cache else LoadedImages
    images = kind(source, candidate.spec, AugmentSettings(), 0, device, settings.data.workers)
    total = -(-len(source) // options.batch_size)
    batches = progress(images.evaluation(options.batch_size), f"evaluating {candidate.name}", total)
    found = predict(candidate.model.to(device), batches, partial(autocast, device.type, options.precision))
    check_unreadable(found.unreadable, len(source))
    return found


def _extra(found: dict[str, Predictions], name: str, source: Source, labels: list[list[int]]) -> ResultRow:
    """Compute additional columns: ReaL accuracy, and the paired difference to the first model."""
    extra: ResultRow = {}
    mine, first = found[name], next(iter(found.values()))
    if labels:
        names = [source.name(int(i)) for i in mine.index]
        extra["real_top1"] = round(real_accuracy(mine.top, names, labels), 3)
    difference = paired_difference(first.correct(), mine.correct())
    columns = zip(("top1_diff", "diff_low", "diff_high"), difference, strict=True)
    return extra | {name: round(value, 3) for name, value in columns}
