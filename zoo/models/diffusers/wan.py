"""Wan 2.1 and 2.2: text- or image-to-video with cross-attention (arXiv 2503.20314)."""

from functools import partial

import torch
from diffusers import ModelMixin, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanRotaryPosEmbed
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hla_kernels.features.rms_norm import in_kernels
from zoo.mixers import Context, Mixer
from zoo.mixers.context import Rotation
from zoo.mixers.layers import TokenRMSNorm, swap_rms_norm
from zoo.models.diffusers.attention import DiffusionSite
from zoo.models.diffusers.family import Family, VideoVae
from zoo.models.diffusers.models import HLADiffusionModel
from zoo.models.timm.attention import split_heads


class WanSite(DiffusionSite, WanAttention):
    """Site in the self-attention of Wan (`attn1`): q and k normalised over all heads, 3-D rotary embedding."""

    processors = ("WanAttnProcessor",)

    def install(self, mixer: Mixer) -> None:
        """Install `mixer`; except for softmax, the q/k norms are replaced by `TokenRMSNorm`."""
        super().install(mixer)
        for norm in (self.norm_q, self.norm_k):
            swap_rms_norm(norm, fused=mixer.name != "softmax")

    def uninstall(self) -> None:
        for norm in (self.norm_q, self.norm_k):
            swap_rms_norm(norm, fused=False)
        super().uninstall()

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        **arguments: object,
    ) -> Tensor:
        """[B, N, C] -> [B, N, C]. Raises ValueError for an unsupported mask and unknown arguments."""
        self.refuse(arguments, encoder_hidden_states)
        if self.mixer_name == "softmax" and self.processor._parallel_config is not None:
            return super().forward(hidden_states, None, attention_mask, rotary_emb)  # the tokens are split
        x = self.with_cpe(hidden_states, self.prefix)
        q, k, v = self.project(x)
        rotate = wan_rotation(rotary_emb, v.shape[-1] // self.heads)
        tables = self.fusable_tables(q, rotate)
        q, k = (norm(t) if tables is None else norm(t, tables) for norm, t in ((self.norm_q, q), (self.norm_k, k)))
        q, k, v = (split_heads(t, self.heads) for t in (q, k, v))
        ctx = Context(
            x=x, grid=self.grid, prefix=self.prefix, mask=attention_mask, rotate=rotate if tables is None else None,
            prepared=tables is not None,
        )  # fmt: skip
        return self.output(self.mixer(q, k, v, ctx).type_as(q))

    def fusable_tables(self, q: Tensor, rotate: Rotation | None) -> tuple[bool, Tensor, Tensor] | None:
        """Return (relu, cos, sin) if one kernel can fuse the q/k norms with feature map and rotation; otherwise None.

        relu: whether the feature map is ReLU.
        """
        name = self.mixer.fusable_map
        if name is None or rotate is None or not type(self.norm_q) is type(self.norm_k) is TokenRMSNorm:
            return None
        relu, (cos, sin) = name == "relu", rotate.tables()
        return (relu, cos, sin) if in_kernels(q, self.norm_q.weight, relu, cos.shape[1]) else None

    @property
    def fused(self) -> bool:
        return self.fused_projections


def wan_rotation(rotary: tuple[Tensor, Tensor] | None, width: int) -> Rotation | None:
    """Return Wan's rotary embedding (cos, sin) [1, N, 1, D] as a `Rotation` [B, N, H, W] -> [B, N, H, W]; None without
    `rotary`.

    W is `width` = D or a multiple of it (feature maps that widen), in groups of D channels.
    """
    if rotary is None:
        return None
    cos, sin = rotary[0][..., 0::2].unsqueeze(-2), rotary[1][..., 1::2].unsqueeze(-2)  # [1, N, 1, 1, D / 2]

    def rotate(t: Tensor) -> Tensor:
        even, odd = t.unflatten(-1, (-1, width // 2, 2)).unbind(-1)
        rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
        return rotated.flatten(-3).type_as(t)

    return Rotation(rotate, lambda: (cos[0, :, 0, 0], sin[0, :, 0, 0]))


def later_tables(
    rope: WanRotaryPosEmbed, args: tuple[Tensor], tables: tuple[Tensor, Tensor], frame: int
) -> tuple[Tensor, ...]:
    """Return the tables (cos, sin) [1, N, 1, D] of `rope` for frames that begin at `frame`; their first channels turn
    with time."""
    frames, width, found = args[0].shape[2] // rope.patch_size[0], rope.t_dim, []
    for table, all_frames in zip(tables, (rope.freqs_cos, rope.freqs_sin), strict=True):
        by_frame = table.unflatten(1, (frames, -1))
        time = all_frames[frame : frame + frames, :width].view(1, frames, 1, 1, width)
        found.append(torch.cat([time.expand(*by_frame.shape[:-1], width), by_frame[..., width:]], -1).flatten(1, 2))
    return tuple(found)


class HLAWanTransformer3DModel(HLADiffusionModel, WanTransformer3DModel):
    """Wan 2.1 and 2.2 with mixers."""

    host = WanTransformer3DModel
    grid_dims = 3
    splits_tokens = True

    @property
    def max_stream(self) -> float:
        return self.rope.max_seq_len

    def start_at(self, frame: int) -> RemovableHandle:
        return self.rope.register_forward_hook(partial(later_tables, frame=frame))


def wan_vae_factors(vae: ModelMixin) -> tuple[int, int]:
    """Return the compression factors (in time, in space); the VAE of Wan 2.2 first packs patches of 2 x 2 pixels."""
    return 2 ** sum(vae.temperal_downsample), 2 ** len(vae.temperal_downsample) * (vae.config.patch_size or 1)


WAN = Family(
    name="wan",
    converted=HLAWanTransformer3DModel,
    sites={"blocks.*.attn1": WanSite},
    skipped="blocks.*.attn2",
    rotary=True,
    grid=(21, 30, 52),  # 81 frames of 480 x 832
    sized=False,
    classes="text_dim",
    class_tokens=True,
    pipelines=("WanPipeline", "WanImageToVideoPipeline"),
    first_frame="WanImageToVideoPipeline",
    encode=lambda pipe, prompts, **options: {"encoder_hidden_states": pipe.encode_prompt(prompts, **options)[0]},
    units=lambda pipe: (pipe.vae_scale_factor_temporal, pipe.vae_scale_factor_spatial),
    fps=16.0,
    vae=VideoVae(
        "AutoencoderKLWan",
        wan_vae_factors,
        lambda vae: ([1 / s for s in vae.config.latents_std], list(vae.config.latents_mean)),
    ),
    vae_dtype=torch.float32,  # as published
)
