"""LTX-Video: video from text or an image, by cross-attention (arXiv 2501.00103)."""

from collections.abc import Callable
from typing import Any

import torch
from diffusers import LTXVideoTransformer3DModel
from diffusers.models.transformers.transformer_ltx import LTXAttention
from torch import Tensor

from zoo.grid import Grid
from zoo.mixers import Context
from zoo.mixers.context import Rotation
from zoo.models.diffusers.attention import DiffusionSite
from zoo.models.diffusers.family import Family, Scaling, VideoVae, embeddings_and_mask
from zoo.models.diffusers.models import HLADiffusionModel
from zoo.models.timm.attention import split_heads


class LTXSite(DiffusionSite, LTXAttention):
    """Site in the self-attention of LTX-Video (`attn1`): norms of q and k over all heads, a rotary embedding whose
    frequencies go on from head to head."""

    processors = ("LTXVideoAttnProcessor",)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        **arguments: Any,
    ) -> Tensor:
        """[B, N, C] -> [B, N, C]. Raises ValueError for a mask that the mixer cannot honour and unknown arguments."""
        self.refuse(arguments, encoder_hidden_states)
        x = self.with_cpe(hidden_states, self.prefix)
        q, k, v = self.project(x)
        q, k, v = (split_heads(t, self.heads) for t in (self.norm_q(q), self.norm_k(k), v))
        rotate = ltx_rotation(image_rotary_emb, self.heads, self.grid is not None)
        ctx = Context(x=x, grid=self.grid, prefix=self.prefix, mask=attention_mask, rotate=rotate)
        return self.output(self.mixer(q, k, v, ctx).to(q.dtype))


def ltx_rotation(rotary: tuple[Tensor, Tensor] | None, heads: int, alike: bool) -> Callable[[Tensor], Tensor] | None:
    """LTX-Video's rotary embedding (cos, sin) [B, N, H D] as a function [B, N, H, W] -> [B, N, H, W]; None without.

    W is D or a multiple of it, as in `wan_rotation`.  alike: whether it is the same for all samples of the batch, as on
    a grid; then it has tables.
    """
    if rotary is None:
        return None
    cos, sin = (t.unflatten(-1, (heads, 1, -1)) for t in rotary)  # [B, N, H, 1, D]

    def rotate(t: Tensor) -> Tensor:
        x = t.unflatten(-1, (-1, cos.shape[-1]))
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-odd, even], dim=-1).flatten(-2)
        return (x.float() * cos + turned.float() * sin).to(t.dtype).flatten(-2)

    return Rotation(rotate, lambda: (cos[0, :, :, 0, 0::2], sin[0, :, :, 0, 0::2])) if alike else rotate


class HLALTXVideoTransformer3DModel(HLADiffusionModel, LTXVideoTransformer3DModel):
    """LTX-Video: video from text or an image, by cross-attention. Its tokens come as a sequence, whose grid is known
    where a call says frames, height and width, and not where it gives the coordinates of each token."""

    host = LTXVideoTransformer3DModel
    grid_dims = 3

    def layout(self, arguments: dict[str, Any]) -> tuple[Grid | None, int]:
        sizes: Any = tuple(arguments.get(name) for name in ("num_frames", "height", "width"))
        return (None if arguments.get("video_coords") is not None or None in sizes else sizes), 0


def places(shape: tuple[int, ...], about: dict[str, Any]) -> dict[str, Any]:
    """What the transformer is told of the tokens of [C, T, H, W]: their numbers, and how many seconds and pixels apart
    they lie."""
    _, frames, height, width = shape
    of_clip = about["image_size"]
    seconds = (of_clip[0] - 1) / max(frames - 1, 1) / about["fps"]
    scale = (seconds, of_clip[1] / height, of_clip[2] / width)
    return {"num_frames": frames, "height": height, "width": width, "rope_interpolation_scale": scale}


def ltx_units(pipe: Any) -> tuple[int, int]:
    """Frames and pixels per side of one latent."""
    return pipe.vae_temporal_compression_ratio, pipe.vae_spatial_compression_ratio


def ltx_vae_factors(vae: Any) -> tuple[int, int]:
    """Frames and pixels per side of one latent."""
    return vae.temporal_compression_ratio, vae.spatial_compression_ratio


def ltx_vae_scaling(vae: Any) -> tuple[Scaling, Scaling]:
    """Scaling and shift of each channel, which lie beside the weights."""
    return (vae.config.scaling_factor / vae.latents_std).tolist(), vae.latents_mean.tolist()


LTX = Family(
    name="ltx",
    converted=HLALTXVideoTransformer3DModel,
    sites={"transformer_blocks.*.attn1": LTXSite},
    left="transformer_blocks.*.attn2",
    rotary=True,
    grid=(16, 16, 24),  # 121 frames of 512 x 768
    packed=True,
    sized=False,
    arguments=places,
    pipelines=("LTXPipeline",),
    encode=embeddings_and_mask,
    units=ltx_units,
    vae=VideoVae("AutoencoderKLLTXVideo", ltx_vae_factors, ltx_vae_scaling),
)
