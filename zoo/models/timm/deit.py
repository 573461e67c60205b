"""Registered names of the DeiT and DeiT-III families, such as `deit_<mixer>_tiny_patch16_224`.

timm derives the family from the name of this file.
"""

from zoo.models.timm.registry import register_family, untrained_cfgs

DEIT_BASES = (
    "deit_tiny_patch16_224",
    "deit_small_patch16_224",
    "deit_base_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "deit_small_distilled_patch16_224",
    "deit_base_distilled_patch16_224",
    "deit3_small_patch16_224",
    "deit3_small_patch16_384",
    "deit3_medium_patch16_224",
    "deit3_base_patch16_224",
    "deit3_base_patch16_384",
)
default_cfgs = untrained_cfgs(DEIT_BASES)
register_family(__name__, DEIT_BASES)
