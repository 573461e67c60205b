"""Conversion of diffusers folders: a pipeline or a transformer, on disk or on the hub, to a folder of the same kind."""

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from zoo.errors import unknown_name
from zoo.files import replacing_folder, sweep
from zoo.models.convert import Report, swap
from zoo.models.diffusers.families import ANY_MODEL, FAMILIES, class_named
from zoo.models.diffusers.reading import in_run, read_config, read_folder
from zoo.precision import DTYPES

REPORT = "report.json"


def convert_folder(source: str, out: Path, mixer: str, precision: str = "fp32", **arguments: Any) -> Report:
    """Load the pipeline or transformer `source`, convert it, save it in `out`, and say what was done.

    source: a folder or the name of a repository on the hub. precision: fp32, bf16 or fp16, of the saved weights.
    arguments: those of `zoo.convert`. `out` is complete or as it was; what an earlier conversion left there goes.
    Beside the model it gets report.json and the folders that `source` holds beside a bare transformer, such as
    scheduler/. Raises ValueError for a source that is neither, for an `out` that holds something else or the source
    itself, and as `zoo.convert`.
    """
    if precision not in DTYPES:
        raise unknown_name("precision", precision, DTYPES)
    _check_out(Path(source), out)
    model = load_folder(source, DTYPES[precision])
    report = swap(model, mixer, **arguments)
    sweep(out.parent, out.name)
    with replacing_folder(out) as folder:
        model.save_pretrained(folder)
        for more in _folders(source):
            if not (folder / more.name).exists():
                shutil.copytree(more, folder / more.name)
        (folder / REPORT).write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    return report


def _check_out(source: Path, out: Path) -> None:
    """Raise ValueError unless `out` may be replaced: it is new, empty, or an earlier conversion of another source."""
    if source.exists() and out.resolve() in (source.resolve(), *source.resolve().parents):
        raise ValueError(f"out={out} holds the source, which would be lost: choose another folder")
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={out} is a file: choose a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / REPORT).is_file():
        raise ValueError(f"out={out} holds something that is no earlier conversion: choose an empty or a new folder")


def _folders(source: str) -> list[Path]:
    """The visible folders in a local `source`."""
    path = Path(source)
    return sorted(p for p in path.iterdir() if p.is_dir() and p.name[0] != ".") if path.is_dir() else []


def load_folder(source: str, dtype: torch.dtype = torch.float32) -> Any:
    """The pipeline or transformer at `source`: a folder of diffusers, a run folder, or a hub name. Raises
    ValueError."""
    source = in_run(source)
    if (read_config(DiffusionPipeline, source) or {}).get("_class_name"):
        return read_folder(DiffusionPipeline, source, torch_dtype=dtype)
    name = (read_config(ANY_MODEL, source) or {}).get("_class_name", "")
    if not name:
        raise ValueError(
            f"there is no diffusers model {source!r}: expected a folder with model_index.json or config.json, or a hub "
            "name that can be reached"
        )
    kind = class_named(name) or getattr(diffusers, name, None)
    if kind is None:
        raise unknown_name("model class", name, [f.host.__name__ for f in FAMILIES])
    return read_folder(kind, source, torch_dtype=dtype)
