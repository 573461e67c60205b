"""Registered names of the ViT family, such as `vit_<mixer>_tiny_patch16_224`.

Includes FlexiViT, NaFlexViT, DINOv2 and ViTs with register tokens. timm derives the family from the name of this file.
"""

from zoo.models.timm.registry import register_family, untrained_cfgs

VIT_BASES = (
    "vit_tiny_patch16_224",
    "vit_tiny_patch16_384",
    "vit_small_patch16_224",
    "vit_small_patch16_384",
    "vit_base_patch16_224",
    "vit_base_patch16_384",
    "vit_large_patch16_224",
    "vit_large_patch16_384",
    "vit_small_patch14_dinov2",
    "vit_base_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2",
    "vit_base_patch14_reg4_dinov2",
    "vit_wee_patch16_reg1_gap_256",
    "vit_little_patch16_reg4_gap_256",
    "vit_medium_patch16_reg4_gap_256",
    "flexivit_small",
    "flexivit_base",
    "naflexvit_base_patch16_gap",
    "naflexvit_base_patch16_siglip",
    "naflexvit_so150m2_patch16_reg1_gap",
)
default_cfgs = untrained_cfgs(VIT_BASES)
register_family(__name__, VIT_BASES)
