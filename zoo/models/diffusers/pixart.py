"""PixArt alpha and sigma: text-to-image with cross-attention (arXiv 2310.00426, 2403.04692)."""

from typing import ClassVar

from diffusers import PixArtTransformer2DModel

from zoo.models.diffusers.attention import SelfAttentionSite
from zoo.models.diffusers.family import Family, embeddings_and_mask
from zoo.models.diffusers.models import HLADiffusionModel


class HLAPixArtTransformer2DModel(HLADiffusionModel, PixArtTransformer2DModel):
    """PixArt with mixers."""

    host = PixArtTransformer2DModel
    _repeated_blocks: ClassVar = ["BasicTransformerBlock"]


PIXART = Family(
    name="pixart",
    converted=HLAPixArtTransformer2DModel,
    sites={"transformer_blocks.*.attn1": SelfAttentionSite},
    skipped="transformer_blocks.*.attn2",
    # required, but unused by the supported models
    arguments=lambda shape, metadata: {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    pipelines=("PixArtAlphaPipeline", "PixArtSigmaPipeline"),
    encode=embeddings_and_mask,
)
