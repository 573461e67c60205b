"""Vision models with higher-order linear attention.

`import zoo` registers the timm names (`timm.create_model("vit_ahla_small_patch16_224")`). `zoo.convert(model, "ahla")`
turns a pretrained softmax model into one of them. `zoo.MIXERS` lists the mixers.
"""

from zoo.backbones import converted, deit, vision_transformer
from zoo.convert import convert
from zoo.mixers import MIXERS

__version__ = "0.1.0"
__all__ = ["MIXERS", "__version__", "convert", "converted", "deit", "vision_transformer"]
