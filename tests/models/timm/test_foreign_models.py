"""Models of other libraries are refused by a sentence that names a timm model of the same architecture."""

import pytest
import timm
import torchvision
import transformers
from torch import nn

import zoo

SMALL = {"num_hidden_layers": 1, "intermediate_size": 8}
BASE = {"hidden_size": 768, "num_attention_heads": 12, **SMALL}


def models() -> dict[str, nn.Module]:
    vit = transformers.ViTConfig(hidden_size=192, num_attention_heads=3, patch_size=16, image_size=224, **SMALL)
    dino = transformers.Dinov2Config(hidden_size=384, num_attention_heads=6, patch_size=14, mlp_ratio=1, **SMALL)
    registers = transformers.Dinov2WithRegistersConfig(**BASE, patch_size=14, mlp_ratio=1)
    siglip = transformers.SiglipVisionConfig(**BASE, patch_size=16, image_size=224)
    torch_vit = torchvision.models.VisionTransformer(224, 16, 1, 12, 768, 8)
    return {
        "vit_tiny_patch16_224": transformers.ViTForImageClassification(vit),
        "vit_small_patch14_dinov2": transformers.Dinov2Model(dino),
        "vit_base_patch14_reg4_dinov2": transformers.Dinov2WithRegistersModel(registers),
        "vit_base_patch16_siglip_224": transformers.SiglipVisionModel(siglip),
        "vit_base_patch16_224": torch_vit,
    }


def test_the_twin_is_named_and_exists():
    for name, model in models().items():
        assert timm.is_model(name)
        with pytest.raises(ValueError, match=f"only models of timm and diffusers.*'{name}'"):
            zoo.convert(model, "la")


def test_an_unusual_size_names_no_twin():
    model = torchvision.models.VisionTransformer(32, 8, 1, 2, 24, 8)
    with pytest.raises(ValueError, match=r"only models of timm and diffusers.*list_models"):
        zoo.convert(model, "la")
