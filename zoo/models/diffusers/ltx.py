"""LTX-Video: text- or image-to-video with cross-attention (arXiv 2501.00103)."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from diffusers import LTXVideoTransformer3DModel
from diffusers.models.transformers.transformer_ltx import LTXAttention, LTXVideoRotaryPosEmbed
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zoo.grid import Grid
from zoo.mixers import Context
from zoo.mixers.context import Rotation
from zoo.models.diffusers.attention import DiffusionSite, rotate_pairs
from zoo.models.diffusers.family import Family, Metadata, VideoVae, embeddings_and_mask
from zoo.models.diffusers.models import HLADiffusionModel
from zoo.models.timm.attention import split_heads


class LTXSite(DiffusionSite, LTXAttention):
    """Site in the self-attention of LTX-Video (`attn1`).

    q and k are normalised over all heads; the frequencies of the rotary embedding differ between heads.
    """

    processors = ("LTXVideoAttnProcessor",)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        **arguments: object,
    ) -> Tensor:
        """[B, N, C] -> [B, N, C]. Raises ValueError for an unsupported mask and unknown arguments."""
        self.refuse(arguments, encoder_hidden_states)
        x = self.with_cpe(hidden_states, self.prefix)
        q, k, v = self.project(x)
        q, k, v = (split_heads(t, self.heads) for t in (self.norm_q(q), self.norm_k(k), v))
        rotate = ltx_rotation(image_rotary_emb, self.heads, self.grid is not None)
        ctx = Context(x=x, grid=self.grid, prefix=self.prefix, mask=attention_mask, rotate=rotate)
        return self.output(self.mixer(q, k, v, ctx).to(q.dtype))


def ltx_rotation(rotary: tuple[Tensor, Tensor] | None, heads: int, shared: bool) -> Callable[[Tensor], Tensor] | None:
    """Return LTX-Video's rotary embedding (cos, sin) [B, N, H D] as a function [B, N, H, W] -> [B, N, H, W]; None
    without `rotary`.

    W is D or a multiple of it, as in `wan_rotation`. shared: whether all samples of the batch have the same rotation,
    as on a grid; the result is then a `Rotation` with tables.
    """
    if rotary is None:
        return None
    cos, sin = (t.unflatten(-1, (heads, 1, -1)) for t in rotary)  # [B, N, H, 1, D]
    rotate = partial(rotate_pairs, cos=cos, sin=sin)
    return Rotation(rotate, lambda: (cos[0, :, :, 0, 0::2], sin[0, :, :, 0, 0::2])) if shared else rotate


def later_coordinates(rope: LTXVideoRotaryPosEmbed, args: tuple, frame: int) -> tuple:
    """Return the arguments of `rope` for frames that begin at `frame`: coordinates [B, 3, N] in seconds and pixels."""
    x, *sizes, scale, _ = args
    places = [torch.arange(n, dtype=torch.float32, device=x.device) for n in sizes]
    places[0] += frame
    patches = rope.patch_size_t, rope.patch_size, rope.patch_size
    if scale is None:  # `rope` divides by these
        scale, patches = (rope.base_num_frames, rope.base_height, rope.base_width), (1, 1, 1)
    lines = (place * a * b for place, a, b in zip(places, scale, patches, strict=True))
    coords = torch.stack(torch.meshgrid(*lines, indexing="ij")).flatten(1)
    return x, *sizes, scale, coords.expand(len(x), -1, -1)


class HLALTXVideoTransformer3DModel(HLADiffusionModel, LTXVideoTransformer3DModel):
    """LTX-Video with mixers.

    Inputs are token sequences. The grid is known if a call passes num_frames, height and width, and unknown if it
    passes the coordinates of each token.
    """

    host = LTXVideoTransformer3DModel
    grid_dims = 3
    max_stream = math.inf

    def start_at(self, frame: int) -> RemovableHandle:
        return self.rope.register_forward_pre_hook(partial(later_coordinates, frame=frame))

    def layout(self, arguments: dict[str, Any]) -> tuple[Grid | None, int]:
        sizes: Any = tuple(arguments.get(name) for name in ("num_frames", "height", "width"))
        return (None if arguments.get("video_coords") is not None or None in sizes else sizes), 0


def rope_arguments(shape: tuple[int, ...], metadata: Metadata) -> dict[str, object]:
    """Return the grid of latents [C, T, H, W] and the spacing of its tokens in seconds and pixels."""
    _, frames, height, width = shape
    clip = metadata["image_size"]  # (frames, height, width) in pixels
    seconds = (clip[0] - 1) / max(frames - 1, 1) / metadata["fps"]
    scale = (seconds, clip[1] / height, clip[2] / width)
    return {"num_frames": frames, "height": height, "width": width, "rope_interpolation_scale": scale}


LTX = Family(
    name="ltx",
    converted=HLALTXVideoTransformer3DModel,
    sites={"transformer_blocks.*.attn1": LTXSite},
    skipped="transformer_blocks.*.attn2",
    rotary=True,
    grid=(16, 16, 24),  # 121 frames of 512 x 768
    packed=True,
    sized=False,
    arguments=rope_arguments,
    pipelines=("LTXPipeline",),
    encode=embeddings_and_mask,
    units=lambda pipe: (pipe.vae_temporal_compression_ratio, pipe.vae_spatial_compression_ratio),
    vae=VideoVae(
        "AutoencoderKLLTXVideo",
        lambda vae: (vae.temporal_compression_ratio, vae.spatial_compression_ratio),
        lambda vae: ((vae.config.scaling_factor / vae.latents_std).tolist(), vae.latents_mean.tolist()),
    ),
)
