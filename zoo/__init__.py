"""Vision models with higher-order linear attention.

`import zoo` registers the timm names (`timm.create_model("vit_mhla_small_patch16_224")`). `zoo.convert(model, "mhla")`
converts a softmax model of timm or diffusers, and `zoo.revert` undoes it. `zoo.Attention` is an attention layer for
your own networks. `zoo.MIXERS` lists the mixers.

The classes of converted diffusers models are attributes (`zoo.HLADiTTransformer2DModel`), imported on first use. Saved
pipelines refer to them, so `import zoo` before loading such a pipeline.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from zoo.mixers import MIXERS
from zoo.models.convert import convert, revert
from zoo.models.timm import converted, deit, vision_transformer, vlt
from zoo.models.timm.layer import Attention
from zoo.models.timm.model_files import (
    PIPELINE,
    check_output_folder,
    holds_diffusers_model,
    holds_weights,
    load_model,
    save_model,
)

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

__version__ = "0.1.0"
__all__ = ["MIXERS", "Attention", "__version__", "convert", "load", "revert", "save"]
__all__ += ["converted", "deit", "vision_transformer", "vlt"]  # modules that register names with timm


def save(model: Any, folder: str | Path) -> None:
    """Write a model or pipeline, with a model card, as a folder that `load` and its own library open.

    model: a timm model (written by timm's `save_for_hf`) or a model or pipeline of diffusers (`save_pretrained`),
    converted or not. Raises ValueError for a timm model that was not made by `timm.create_model` (it has no name), and
    for a folder with a run or with another kind of model, which `load` would open instead.
    """
    folder, by_timm = Path(folder), not hasattr(model, "save_pretrained")
    check_output_folder("", folder)
    other = holds_diffusers_model(folder) if by_timm else holds_weights(folder)
    if other or (isinstance(model, nn.Module) and (folder / PIPELINE).exists()):
        raise ValueError(f"{folder} holds another kind of model: choose another folder")
    if by_timm:
        save_model(model, folder)
    else:
        model.save_pretrained(folder)


def load(path: str | Path) -> "nn.Module | DiffusionPipeline":
    """Load a model saved with this package, on the CPU and in evaluation mode.

    path: a run folder (EMA weights if it has any), a .safetensors file of a run, or a folder written by `zoo convert`,
    timm's `save_for_hf` or diffusers' `save_pretrained` (for a pipeline folder, the pipeline is returned). Raises
    ValueError for anything else.
    """
    if holds_diffusers_model(Path(path)):
        from zoo.models.diffusers.convert_folder import load_folder

        loaded = load_folder(str(path))
        return loaded.eval() if isinstance(loaded, nn.Module) else loaded
    return load_model(path)[0].eval()


def __getattr__(name: str) -> Any:
    """Return a class of converted diffusers models, or `ModelMixin`, which diffusers expects of a model library."""
    if name == "ModelMixin" or (name.startswith("HLA") and name.endswith("Model")):
        from diffusers import ModelMixin

        from zoo.models.diffusers.families import class_named

        if (cls := ModelMixin if name == "ModelMixin" else class_named(name)) is not None:
            return cls
    raise AttributeError(f"module 'zoo' has no attribute {name!r}")
