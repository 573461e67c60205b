"""PixArt alpha and sigma: images from text, by cross-attention (arXiv 2310.00426, 2403.04692)."""

from typing import Any, ClassVar

from diffusers import PixArtTransformer2DModel
from diffusers.loaders import PeftAdapterMixin

from zoo.models.diffusers.attention import SelfAttentionSite
from zoo.models.diffusers.family import Family, embeddings_and_mask
from zoo.models.diffusers.models import HLADiffusionModel


class HLAPixArtTransformer2DModel(HLADiffusionModel, PeftAdapterMixin, PixArtTransformer2DModel):
    """PixArt with mixers."""

    host = PixArtTransformer2DModel
    _repeated_blocks: ClassVar = ["BasicTransformerBlock"]


def no_conditions(shape: tuple[int, ...], about: dict[str, Any]) -> dict[str, Any]:
    """The forward pass asks for resolution and aspect ratio, which it does not read in the models that are allowed."""
    return {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}


PIXART = Family(
    name="pixart",
    converted=HLAPixArtTransformer2DModel,
    sites={"transformer_blocks.*.attn1": SelfAttentionSite},
    left="transformer_blocks.*.attn2",
    legacy_class="Transformer2DModel",
    arguments=no_conditions,
    pipelines=("PixArtAlphaPipeline", "PixArtSigmaPipeline"),
    encode=embeddings_and_mask,
)
