"""Stable Diffusion 3 and 3.5: text-to-image with joint attention (arXiv 2403.03206)."""

from typing import ClassVar

from diffusers import DiffusionPipeline, SD3Transformer2DModel
from diffusers.models.attention_processor import Attention
from torch import Tensor

from zoo.models.diffusers.attention import SelfAttentionSite, norm_heads
from zoo.models.diffusers.family import Family
from zoo.models.diffusers.joint import JointSite
from zoo.models.diffusers.models import HLADiffusionModel
from zoo.models.timm.attention import split_heads


class SD3Site(JointSite, Attention):
    """Site in the joint attention of SD3: image tokens come first, text has its own projections."""

    processors = ("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0")

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **arguments: object,
    ) -> tuple[Tensor, Tensor]:
        """[B, N, C] and text [B, M, C] -> the same shapes. Raises ValueError for a mask and unknown arguments."""
        self.refuse(arguments)
        if attention_mask is not None or encoder_hidden_states is None:
            raise ValueError("the joint attention of SD3 needs text tokens and does not support an attention mask")
        text_x = encoder_hidden_states
        x = self.with_cpe(hidden_states, 0)
        q, k, v = (split_heads(t, self.heads) for t in self.project(x))
        added = (self.add_q_proj, self.add_k_proj, self.add_v_proj)
        text = self.to_added_qkv(text_x).chunk(3, dim=-1) if self.fused else [proj(text_x) for proj in added]
        text_q, text_k, text_v = (split_heads(t, self.heads) for t in text)
        image = norm_heads(self.norm_q, q), norm_heads(self.norm_k, k), v
        texts = norm_heads(self.norm_added_q, text_q), norm_heads(self.norm_added_k, text_k), text_v
        o, text_o = (t.to(q.dtype) for t in self.joint(image, texts, x, text_first=False))
        text_o = text_o.flatten(2)
        return self.output(o), text_o if self.context_pre_only else self.to_add_out(text_o)


class HLASD3Transformer2DModel(HLADiffusionModel, SD3Transformer2DModel):
    """Stable Diffusion 3 and 3.5 with mixers."""

    host = SD3Transformer2DModel
    _repeated_blocks: ClassVar = ["JointTransformerBlock"]


def encode_sd3(pipe: DiffusionPipeline, prompts: list[str], **options: object) -> dict[str, Tensor]:
    """Encode prompts with three text encoders; two of them also return pooled embeddings."""
    embeddings, _, pooled, *_ = pipe.encode_prompt(prompts, None, None, **options)
    return {"encoder_hidden_states": embeddings, "pooled_projections": pooled}


SD3 = Family(
    name="sd3",
    converted=HLASD3Transformer2DModel,
    sites={"transformer_blocks.*.attn": SD3Site, "transformer_blocks.*.attn2": SelfAttentionSite},
    pipelines=("StableDiffusion3Pipeline",),
    encode=encode_sd3,
)
