"""Registered names of VLT, hierarchical models with attention in all four stages: `vlt_<mixer>_small`.

timm derives the family from the name of this file.
"""

from timm.models import generate_default_cfgs, register_model
from timm.models.metaformer import Attention, LayerNormNoBias, MetaFormer, _create_metaformer

from zoo.models.timm.registry import register_family, untrained_cfgs

VLT_BASES = ("vlt_small",)
FIELDS = {"input_size": (3, 224, 224), "pool_size": (7, 7), "crop_pct": 1.0, "interpolation": "bicubic"}
default_cfgs = generate_default_cfgs({"vlt_small": {**FIELDS, "classifier": "head.fc", "first_conv": "stem.conv"}})


@register_model
def vlt_small(pretrained: bool = False, **kwargs) -> MetaFormer:
    """CAFormer-S18 with attention instead of convolutions in the first two stages, for training from scratch.

    26.3 M parameters; the VLT-S of the MHLA paper, whose layers are not published, has 27 M. 3,136 tokens in the first
    stage at 224 pixels. keywords: as for timm's MetaFormer.
    """
    layers = {"depths": [3, 3, 9, 3], "dims": [64, 128, 320, 512]}
    modules = {"token_mixers": Attention, "norm_layers": LayerNormNoBias}
    return _create_metaformer("vlt_small", pretrained=pretrained, **{**layers, **modules, **kwargs})


default_cfgs.update(untrained_cfgs(VLT_BASES))
register_family(__name__, VLT_BASES, {"cpe": 3})
