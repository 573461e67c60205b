"""Conversion of diffusers folders: a pipeline or a transformer, on disk or on the hub, to a folder of the same kind."""

from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

import zoo
from zoo.backbones.diffusion.hosts import FAMILIES
from zoo.convert import Report, swap
from zoo.names import unknown_name

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def convert_folder(source: str, out: Path, mixer: str, precision: str = "fp32", **arguments: Any) -> Report:
    """Load the pipeline or transformer `source`, convert it, save it in `out`, and say what was done.

    source: a folder or the name of a repository on the hub. precision: fp32, bf16 or fp16, of the saved weights.
    arguments: those of `zoo.convert`. Raises ValueError for a source that is neither, and as `zoo.convert`.
    """
    if precision not in DTYPES:
        raise unknown_name("precision", precision, DTYPES)
    model = _load(source, DTYPES[precision])
    report = swap(model, mixer, **arguments)
    model.save_pretrained(out)
    return report


def _load(source: str, dtype: torch.dtype) -> Any:
    if _class_name(DiffusionPipeline, source):
        return DiffusionPipeline.from_pretrained(source, torch_dtype=dtype)
    name = _class_name(next(iter(FAMILIES)), source)
    if not name:
        raise ValueError(
            f"there is no diffusers model {source!r}: expected a folder with model_index.json or config.json, or a hub "
            "name that can be reached"
        )
    kind = getattr(diffusers, name, None) or getattr(zoo, name, None)
    if kind is None:
        raise unknown_name("model class", name, [host.__name__ for host in FAMILIES])
    return kind.from_pretrained(source, torch_dtype=dtype)


def _class_name(kind: Any, source: str) -> str:
    """The class that the configuration of a pipeline or model names; "" where there is no such configuration."""
    try:
        return kind.load_config(source).get("_class_name", "")
    except OSError:
        return ""
