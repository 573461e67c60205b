"""Features of images: the networks (`networks`) and their run over sets of images (`extract`)."""

from zoo.eval.generation.extractors.networks import (
    INCEPTION,
    Extractor,
    Features,
    Inception,
    ModuleExtractor,
    open_extractor,
    timm_extractor,
    weights_hash,
)

__all__ = [
    "INCEPTION",
    "Extractor",
    "Features",
    "Inception",
    "ModuleExtractor",
    "open_extractor",
    "timm_extractor",
    "weights_hash",
]
