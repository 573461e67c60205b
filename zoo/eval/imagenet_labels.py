"""ImageNet labels: reassessed labels (ReaL), and folders named by class number (ImageNet-V2)."""

import json
import os
import re
from importlib.resources import files
from pathlib import Path

import numpy as np

REAL_LABELS = "_info/imagenet_real_labels.json"  # inside timm.data


def load_real_labels(file: str | None = None) -> list[list[int]]:
    """Load the ReaL labels (Beyer et al., arXiv 2006.07159): a list of acceptable classes for each of the 50,000
    validation images, in order. Images with an empty list do not count.

    file: a JSON list of lists; None for the file that comes with timm. Raises ValueError for a file that is missing or
    holds something else.
    """
    place = Path(file) if file else files("timm.data") / REAL_LABELS
    try:
        labels = json.loads(place.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"the ReaL labels {file} cannot be read: {error}") from error
    if not (isinstance(labels, list) and all(isinstance(row, list) for row in labels)):
        raise ValueError(f"the ReaL labels {file} must be a list with one list of class numbers per image")
    return labels


def real_accuracy(top: np.ndarray, names: list[str], labels: list[list[int]]) -> float:
    """Compute the ReaL top-1 accuracy: percentage of the images whose first prediction is one of their acceptable
    classes.

    top: predictions [N, k].  names: N file names such as `ILSVRC2012_val_00000001.JPEG`, which give the position in
    `labels`. Images without acceptable classes are left out. Raises ValueError for other file names.
    """
    hits = []
    for row, name in zip(top, names, strict=True):
        accepted = labels[image_number(name, len(labels))]
        if accepted:
            hits.append(int(row[0]) in accepted)
    if not hits:
        raise ValueError("none of the images has ReaL labels")
    return 100.0 * float(np.mean(hits))


def image_number(name: str, n: int) -> int:
    """Return the position of a validation image in a list of `n` labels, from its file name. Raises ValueError."""
    stem = os.path.basename(name).rsplit(".", 1)[0]
    match = re.fullmatch(r"ILSVRC2012_val_(\d+)(_n\d{8})?", stem)  # some copies of ImageNet append the class
    if not match or not 0 < int(match[1]) <= n:
        raise ValueError(
            f"{name} is not an ImageNet validation image (ILSVRC2012_val_00000001.JPEG), so it has no ReaL labels"
        )
    return int(match[1]) - 1


def numeric_classes(root: str) -> dict[str, int] | None:
    """Return the class number of each sub-folder of `root`, if all are named by their class number, as in
    ImageNet-V2; else None."""
    folders = [entry.name for entry in os.scandir(root) if entry.is_dir()] if os.path.isdir(root) else []
    return {name: int(name) for name in folders} if folders and all(f.isdecimal() for f in folders) else None
