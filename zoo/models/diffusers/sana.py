"""Sana: text-to-image with cross-attention and linear self-attention (arXiv 2410.10629)."""

from typing import ClassVar

import torch
from diffusers import SanaTransformer2DModel
from diffusers.models.attention_processor import Attention
from torch import Tensor

from zoo.mixers import Context
from zoo.models.diffusers.attention import SelfAttentionSiteBase
from zoo.models.diffusers.family import Family, embeddings_and_mask
from zoo.models.diffusers.models import HLADiffusionModel
from zoo.models.timm.attention import split_heads


class SanaSite(SelfAttentionSiteBase, Attention):
    """Site in the linear self-attention of Sana (`attn1`); q and k are normalised over all heads."""

    processors = ("SanaLinearAttnProcessor2_0",)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Compute the attention [B, N, C] -> [B, N, C]."""
        x = self.with_cpe(x, self.prefix)
        q, k, v = self.project(x)
        q = q if self.norm_q is None else self.norm_q(q)
        k = k if self.norm_k is None else self.norm_k(k)
        ctx = Context(x=x, grid=self.grid, prefix=self.prefix, mask=mask)
        o = self.output(self.mixer(*(split_heads(t, self.heads) for t in (q, k, v)), ctx).to(x.dtype))
        return o.clip(-65504, 65504) if o.dtype == torch.float16 else o


class HLASanaTransformer2DModel(HLADiffusionModel, SanaTransformer2DModel):
    """Sana with mixers."""

    host = SanaTransformer2DModel
    _repeated_blocks: ClassVar = ["SanaTransformerBlock"]


SANA = Family(
    name="sana",
    converted=HLASanaTransformer2DModel,
    sites={"transformer_blocks.*.attn1": SanaSite},
    skipped="transformer_blocks.*.attn2",
    mixer="la",
    time_factor="timestep_scale",
    pipelines=("SanaPipeline",),
    encode=embeddings_and_mask,
)
