"""Conversion of diffusers folders: a pipeline or a transformer, local or on the hub."""

import shutil
from pathlib import Path

import diffusers
import torch
from diffusers import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from zoo.errors import unknown_name
from zoo.files import replacing_folder, sweep
from zoo.io import write_json
from zoo.models.convert import Report, swap
from zoo.models.diffusers.families import ANY_MODEL, FAMILIES, class_named
from zoo.models.diffusers.reading import in_run, read_config, read_folder
from zoo.precision import DTYPES

REPORT = "report.json"


def convert_folder(source: str, out: Path, mixer: str, precision: str = "fp32", **arguments) -> Report:
    """Load the pipeline or transformer `source`, convert it, save it in `out`, and return the report.

    source: local folder or hub name.
    out: folder, written atomically; an earlier conversion there is replaced. It also gets report.json and, if `source`
        is a transformer, the other folders of `source`, such as scheduler/.
    precision: dtype of the saved weights, fp32, bf16 or fp16.
    arguments: arguments of `zoo.convert`.
    Raises ValueError for a source that is not a pipeline or transformer, an `out` that contains other files or the
    source, and like `zoo.convert`.
    """
    if precision not in DTYPES:
        raise unknown_name("precision", precision, DTYPES)
    _check_out(Path(source), out)
    model = load_folder(source, DTYPES[precision])
    report = swap(model, mixer, **arguments)
    sweep(out.parent, out.name)
    with replacing_folder(out) as folder:
        model.save_pretrained(folder)
        for other in _folders(source):
            if not (folder / other.name).exists():
                shutil.copytree(other, folder / other.name)
        write_json(report.to_dict(), folder / REPORT)
    return report


def _check_out(source: Path, out: Path) -> None:
    """Raise ValueError unless `out` is new, empty, or an earlier conversion of another source."""
    if source.exists() and out.resolve() in (source.resolve(), *source.resolve().parents):
        raise ValueError(f"out={out} holds the source, which would be lost: choose another folder")
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={out} is a file: choose a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / REPORT).is_file():
        raise ValueError(f"out={out} holds other files than an earlier conversion: choose an empty or a new folder")


def _folders(source: str) -> list[Path]:
    """Return the visible folders in a local `source`."""
    path = Path(source)
    return sorted(p for p in path.iterdir() if p.is_dir() and p.name[0] != ".") if path.is_dir() else []


def load_folder(source: str, dtype: torch.dtype = torch.float32) -> ModelMixin | DiffusionPipeline:
    """Load the pipeline or transformer in a diffusers folder, run folder or hub repository.

    Raises ValueError if there is none, for an unknown class, and for weights that cannot be read.
    """
    source = in_run(source)
    if (read_config(DiffusionPipeline, source) or {}).get("_class_name"):
        return read_folder(DiffusionPipeline, source, dtype=dtype)
    name = (read_config(ANY_MODEL, source) or {}).get("_class_name", "")
    if not name:
        raise ValueError(
            f"there is no diffusers model {source!r}: expected a folder with model_index.json or config.json, or a hub "
            "name that can be reached"
        )
    kind = class_named(name) or getattr(diffusers, name, None)
    if kind is None:
        raise unknown_name("model class", name, [f.host.__name__ for f in FAMILIES])
    return read_folder(kind, source, dtype=dtype)
