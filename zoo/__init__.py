"""Vision models with higher-order linear attention.

`import zoo` registers the timm names (`timm.create_model("vit_mhla_small_patch16_224")`). `zoo.convert(model, "mhla")`
turns a pretrained softmax model of timm or diffusers into one of them, and `zoo.revert` back. `zoo.Attention` is one
attention layer for networks of your own. `zoo.MIXERS` lists the mixers.

The classes of converted diffusers models are attributes too (`zoo.HLADiTTransformer2DModel`), imported when asked for:
saved pipelines name them as ("zoo", "HLADiTTransformer2DModel") and load once `import zoo` was done.
"""

from pathlib import Path
from typing import Any

from torch import nn

from zoo.mixers import MIXERS
from zoo.models.convert import convert, revert
from zoo.models.timm import converted, deit, vision_transformer
from zoo.models.timm.layer import Attention
from zoo.models.timm.model_files import load_model

__version__ = "0.1.0"
__all__ = ["MIXERS", "Attention", "__version__", "convert", "converted", "deit", "load", "revert", "vision_transformer"]


def load(path: str | Path) -> nn.Module:
    """The image model in a run folder of tools/train_vit.py (the average of its weights, if it kept one) or in a
    .safetensors file of it, in evaluation mode. Raises ValueError for anything else."""
    return load_model(path)[0].eval()


def __getattr__(name: str) -> Any:
    """Classes of diffusers models; `ModelMixin` is what diffusers looks for in a library of models."""
    if name == "ModelMixin" or (name.startswith("HLA") and name.endswith("Model")):
        from zoo.models.diffusers import models

        if hasattr(models, name):
            return getattr(models, name)
    raise AttributeError(f"module 'zoo' has no attribute {name!r}")
