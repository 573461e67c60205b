"""Backbones: the timm models that mixers go into.

Sites (`sites.py`), the model that tells them their grid (`hosts.py`), their checkpoints, what a model is called
(`record.py`), families that are refused, and the registered names, one file a family (`vision_transformer.py`,
`deit.py`: timm takes the family from the file name) and one name for all others (`converted.py`).
"""

CONVERTED = "hla_converted"  # the registered name of models that have no name of their own


def hla_name(base: str, mixer: str) -> str:
    """The registered name of timm's `base` with `mixer`: "vit_tiny_patch16_224" -> "vit_ahla_tiny_patch16_224"."""
    family, _, rest = base.partition("_")
    return f"{family}_{mixer}_{rest}"
