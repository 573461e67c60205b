"""PixArt alpha and sigma: text-to-image with cross-attention (arXiv 2310.00426, 2403.04692)."""

from typing import ClassVar

from diffusers import PixArtTransformer2DModel

from zoo.models.diffusers.attention import SelfAttentionSite
from zoo.models.diffusers.family import Family, Metadata, embeddings_and_mask
from zoo.models.diffusers.models import HLADiffusionModel


class HLAPixArtTransformer2DModel(HLADiffusionModel, PixArtTransformer2DModel):
    """PixArt with mixers."""

    host = PixArtTransformer2DModel
    _repeated_blocks: ClassVar = ["BasicTransformerBlock"]


def no_conditions(shape: tuple[int, ...], metadata: Metadata) -> dict[str, object]:
    """Return empty resolution and aspect ratio: required arguments, unused by the supported models."""
    return {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}


PIXART = Family(
    name="pixart",
    converted=HLAPixArtTransformer2DModel,
    sites={"transformer_blocks.*.attn1": SelfAttentionSite},
    skipped="transformer_blocks.*.attn2",
    legacy_class="Transformer2DModel",
    arguments=no_conditions,
    pipelines=("PixArtAlphaPipeline", "PixArtSigmaPipeline"),
    encode=embeddings_and_mask,
)
