"""Folders of diffusers, on disk or on the hub, read with one sentence for what is wrong with them."""

from pathlib import Path
from typing import Any

from torch import nn

from zoo.models.digests import check_folder

IN_A_RUN = ("transformer_ema", "transformer")  # where tools/finetune_dit.py saves models


def read_config(kind: Any, where: str, **place: str) -> dict[str, Any] | None:
    """The configuration that `kind.load_config` finds at `where`; None where there is none. Raises ValueError for one
    that is no mapping or names its class in another way than by a word."""
    try:
        found: Any = kind.load_config(where, **place)
    except OSError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("_class_name", ""), str):
        raise ValueError(f"the configuration of {where} is none of diffusers: expected a mapping with _class_name")
    return dict(found)


def in_run(where: str) -> str:
    """`where`, or of a run folder of tools/finetune_dit.py the folder of its transformer: of the EMA if there is one,
    which is printed."""
    inside = [path for name in IN_A_RUN if (path := Path(where, name) / "config.json").is_file()]
    if not inside or any(Path(where, name).exists() for name in ("config.json", "model_index.json")):
        return where
    print(f"{where}: taking {inside[0].parent}", flush=True)
    return str(inside[0].parent)


def read_folder(kind: Any, where: str, **options: Any) -> Any:
    """`kind.from_pretrained(where, **options)`. Raises ValueError for parts that are missing, damaged or do not fit."""
    try:
        check_folder(Path(where))
        found = kind.from_pretrained(where, **options)
    except Exception as error:  # of diffusers, transformers, safetensors, json, torch
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"the checkpoint {where} cannot be read: {reason}") from error
    parts = getattr(found, "components", {"": found})
    for name, part in parts.items():
        if not len(getattr(part, "transformer_blocks", (None,))):
            raise ValueError(f"the model {where} has no blocks")
        tensors = part.named_parameters() if isinstance(part, nn.Module) else ()
        if lacking := [key for key, tensor in tensors if tensor.is_meta]:  # so diffusers leaves what it did not find
            raise ValueError(f"the checkpoint {where} lacks weights{name and f' of {name}'}, such as {lacking[0]}")
    return found
