"""DiT: class-conditional images (arXiv 2212.09748)."""

from typing import ClassVar

from diffusers import DiTTransformer2DModel
from torch import nn

from zoo.models.diffusers.attention import SelfAttentionSite
from zoo.models.diffusers.family import Family
from zoo.models.diffusers.models import HLADiffusionModel


class HLADiTTransformer2DModel(HLADiffusionModel, DiTTransformer2DModel):
    """DiT with mixers."""

    host = DiTTransformer2DModel
    _repeated_blocks: ClassVar = ["BasicTransformerBlock"]
    _no_split_modules: ClassVar = ["BasicTransformerBlock", "PatchEmbed"]  # as in PixArt, for device_map="auto"


def initialise(model: nn.Module) -> None:
    """Initialise as DiT (section 3.2 and its code): blocks start as the identity."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight.view(len(module.weight), -1))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
            if name.endswith(("norm1.linear", "proj_out_1", "proj_out_2")):
                nn.init.zeros_(module.weight)
            elif ".timestep_embedder." in name:
                nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


DIT = Family(
    name="dit",
    converted=HLADiTTransformer2DModel,
    sites={"transformer_blocks.*.attn1": SelfAttentionSite},
    classes="num_embeds_ada_norm",
    initialise=initialise,
    pipelines=("DiTPipeline",),
)
