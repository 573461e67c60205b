"""Reading of diffusers folders, local or on the hub, with a ValueError for invalid ones."""

import re
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline, ModelMixin
from torch import nn

from zoo.files import is_missing_run
from zoo.models.digests import check_folder

Loadable = type[ModelMixin] | type[DiffusionPipeline]
# names of weights in diffusers and transformers, such as diffusion_pytorch_model.fp16-00001-of-00002.safetensors
SHARD = r"(-\d+-of-\d+)?"
WEIGHT_FILE = re.compile(rf"\w*model{SHARD}(\.(?P<variant>\w+))?{SHARD}\.(safetensors|bin)")
IN_A_RUN = ("transformer_ema", "transformer")  # model folders of a training run


def read_config(kind: Loadable, where: str, **place: str) -> dict[str, Any] | None:
    """Read a configuration with `kind.load_config(where, **place)`; None if there is none.

    Raises ValueError for a configuration that is not a mapping or has an invalid _class_name.
    """
    if is_missing_run(where):  # the hub would be asked, for minutes if it cannot be reached
        return None
    try:
        config = kind.load_config(where, **place)
    except OSError:
        return None
    if not isinstance(config, dict) or not isinstance(config.get("_class_name", ""), str):
        raise ValueError(f"the configuration of {where} is not from diffusers: expected a mapping with _class_name")
    return dict(config)


def in_run(where: str) -> str:
    """Return the transformer folder inside a run folder (the EMA weights if there are any) and print it; return other
    paths unchanged."""
    inside = [path for name in IN_A_RUN if (path := Path(where, name) / "config.json").is_file()]
    if not inside or any(Path(where, name).exists() for name in ("config.json", "model_index.json")):
        return where
    print(f"{where}: using {inside[0].parent}", flush=True)
    return str(inside[0].parent)


def only_variant(folder: Path) -> str | None:
    """Return the variant of the weights in a model or pipeline folder saved with `variant=`, such as fp16; None if each
    model has weights without a variant. Raises ValueError for several variants."""
    found: dict[Path, set[str | None]] = {}
    for file in (*folder.glob("*"), *folder.glob("*/*")):
        if match := WEIGHT_FILE.fullmatch(file.name):
            found.setdefault(file.parent, set()).add(match["variant"])
    needed = [{name for name in names if name} for names in found.values() if None not in names]
    if not needed:
        return None
    common = set.intersection(*needed)
    if len(common) != 1:
        names = ", ".join(sorted(set.union(*needed)))
        raise ValueError(
            f"{folder} holds several variants of its weights ({names}): load one with from_pretrained(..., variant=) "
            "and save it without variant="
        )
    return common.pop()


def read_folder(kind: Loadable, where: str, **options: object) -> ModelMixin | DiffusionPipeline:
    """Call `kind.from_pretrained(where, **options)`, with the variant of the weights if there is only one. Raises
    ValueError for missing, damaged or unsuitable files."""
    variant = only_variant(Path(where))
    if variant:
        print(f"{where}: using the variant {variant}", flush=True)
    try:
        check_folder(Path(where))
        loaded = kind.from_pretrained(where, variant=variant, **options)
    except Exception as error:  # diffusers, transformers, safetensors, json and torch raise different errors
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"the checkpoint {where} cannot be read: {reason}") from error
    components = getattr(loaded, "components", {"": loaded})
    for name, component in components.items():
        if not len(getattr(component, "transformer_blocks", (None,))):
            raise ValueError(f"the model {where} has no blocks")
        tensors = component.named_parameters() if isinstance(component, nn.Module) else ()
        if missing := [key for key, tensor in tensors if tensor.is_meta]:  # diffusers leaves missing weights on meta
            raise ValueError(f"the checkpoint {where} lacks weights{name and f' of {name}'}, such as {missing[0]}")
    return loaded
