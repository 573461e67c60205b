"""Attention sites of diffusers models: the host's attention module with a mixer where its attention was.

As in `zoo.models.timm.attention` a site is a subclass of the host's attention class that overrides only `forward`: a
live module becomes a site by a change of class, weights are inherited by identity and new parameters lie under
`.mixer.`. Projections and norms are always called as modules, since adapters, quantisers and offloading replace or hook
them. All q, k, v, o here are [B, N, H, D]; x is [B, N, C].
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_ltx import LTXAttention
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor

from hla_kernels.features.rms_norm import in_kernels
from zoo.grid import Grid
from zoo.mixers import Context, Mixer
from zoo.mixers.context import Rotation
from zoo.mixers.layers import TokenRMSNorm, norm_tokens
from zoo.models.checkpoint_tags import encode_tag
from zoo.models.timm.attention import Site, split_heads

PLAIN = ("AttnProcessor2_0", "FusedAttnProcessor2_0", "AttnProcessor", "SlicedAttnProcessor", "XFormersAttnProcessor")
JOINT = ("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0", "XFormersJointAttnProcessor")


class DiffusionSite(Site):
    """What the sites of all families share: the processors that they stand for, the fused projections, the output."""

    processors: ClassVar[tuple[str, ...]] = PLAIN
    grid: Grid | None = None
    prefix: int = 0

    @classmethod
    def check_processor(cls, processor: Any) -> None:
        """Raise ValueError for a processor that does more than the attention that the mixer takes the place of."""
        kind = type(processor).__name__
        if kind in (*PLAIN, *JOINT) and kind not in cls.processors:
            raise ValueError(
                f"{kind} computes another attention than this kind of layer has (joint with the text, or linear); "
                f"allowed: {', '.join(cls.processors)}"
            )
        if kind not in cls.processors:
            raise ValueError(
                f"{kind} does more than the self-attention that a mixer takes the place of (adapters and guidance have "
                f"no linear form here); allowed: {', '.join(cls.processors)}"
            )

    def set_processor(self, processor: Any) -> None:
        """Take note of a stock processor (the mixer stays); ValueError for one that does more than attention."""
        self.check_processor(processor)
        super().set_processor(processor)

    @property
    def needs_grid(self) -> bool:
        """Whether the mixer's result depends on where the tokens lie."""
        return self.mixer.options.needs_grid

    def _tag(self) -> Tensor:
        return encode_tag(self.mixer.config).to(self.to_q.weight.device)

    @property
    def fused(self) -> bool:
        """Whether q, k and v come from one projection (`fuse_qkv_projections`)."""
        return hasattr(self, "to_qkv") and type(self.processor).__name__.startswith("Fused")

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v as the projections return them, [B, N, H D] each: three tensors, viewed but never copied."""
        return self.to_qkv(x).chunk(3, dim=-1) if self.fused else (self.to_q(x), self.to_k(x), self.to_v(x))

    def output(self, o: Tensor) -> Tensor:
        """[B, N, H, D] -> [B, N, C]."""
        return self.to_out[1](self.to_out[0](o.flatten(2)))

    def refuse(self, arguments: dict[str, Any], encoder_hidden_states: Tensor | None = None) -> None:
        """Raise ValueError for keyword arguments of an attention call that nothing here would read, and when a
        self-attention is given other tokens to attend to."""
        if arguments:
            raise ValueError(f"a converted attention layer cannot honour the argument {next(iter(arguments))!r}")
        if encoder_hidden_states is not None:
            raise ValueError("a converted layer is self-attention: encoder_hidden_states must be None")


def real_keys(bias: Tensor) -> Tensor:
    """[B, 1, N], 0 for a real key and -10000 for padding, as [B, N] bool. Raises ValueError for other values."""
    real = bias[:, 0] == 0
    if not torch.compiler.is_compiling() and not (real | (bias[:, 0] < -9000)).all():
        raise ValueError("a linear mixer honours an attention mask of 0 (real) and -10000 (padding), not other biases")
    return real


def norm_heads(norm: Any, t: Tensor) -> Tensor:
    """The host's norm of each head's D channels, heads first so that gradients are summed as in the host."""
    return t if norm is None else norm(t.transpose(1, 2)).transpose(1, 2)


class LoneSite(DiffusionSite):
    """Site in a self-attention that is called with a mask at most."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **arguments: Any,
    ) -> Tensor:
        """[B, N, C] -> [B, N, C]. Raises ValueError for a mask that the mixer cannot honour and unknown arguments."""
        self.refuse(arguments, encoder_hidden_states)
        return self.attend(hidden_states, attention_mask)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """[B, N, C] -> [B, N, C]."""
        raise NotImplementedError


class SelfAttentionSite(LoneSite, Attention):
    """Site in the self-attention of DiT and PixArt (`attn1`) and in the second attention of SD3.5 (`attn2`)."""

    processors = (*PLAIN, *JOINT)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """[B, N, C] -> [B, N, C]. mask: a bias on the scores; two-sided mixers honour [B, 1, N], padding. Raises
        ValueError for any other that the mixer cannot honour."""
        padding = None
        if mask is not None and not self.mixer.forms_matrix and mask.shape[1] == 1:
            padding, mask = real_keys(mask), None
        if mask is not None:
            mask = self.prepare_attention_mask(mask, x.shape[1], x.shape[0]).unflatten(0, (x.shape[0], self.heads))
        x = self.placed(x, self.prefix, padding)
        q, k, v = (split_heads(t, self.heads) for t in self.project(x))
        q, k = norm_heads(self.norm_q, q), norm_heads(self.norm_k, k)
        ctx = Context(x=x, grid=self.grid, prefix=self.prefix, mask=mask, key_padding_mask=padding)
        return self.output(self.mixer(q, k, v, ctx).to(q.dtype))


class SanaSite(LoneSite, Attention):
    """Site in the self-attention of Sana (`attn1`), which is linear already; norms of q and k are over all heads."""

    processors = ("SanaLinearAttnProcessor2_0",)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """[B, N, C] -> [B, N, C]."""
        x = self.placed(x, self.prefix)
        q, k, v = self.project(x)
        q = q if self.norm_q is None else self.norm_q(q)
        k = k if self.norm_k is None else self.norm_k(k)
        ctx = Context(x=x, grid=self.grid, prefix=self.prefix, mask=mask)
        o = self.output(self.mixer(*(split_heads(t, self.heads) for t in (q, k, v)), ctx).to(x.dtype))
        return o.clip(-65504, 65504) if o.dtype == torch.float16 else o


class WanSite(DiffusionSite, WanAttention):
    """Site in the self-attention of Wan (`attn1`): norms of q and k over all heads, rotary embedding in 3-D."""

    processors = ("WanAttnProcessor",)

    def install(self, mixer: Mixer) -> None:
        """As everywhere; beside a mixer of ours the norms form no float32 tensors under autocast."""
        super().install(mixer)
        for norm in (self.norm_q, self.norm_k):
            norm_tokens(norm, mixer.name != "softmax")

    def release(self) -> None:
        for norm in (self.norm_q, self.norm_k):
            norm_tokens(norm, False)
        super().release()

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        **arguments: Any,
    ) -> Tensor:
        """[B, N, C] -> [B, N, C]. Raises ValueError for a mask that the mixer cannot honour and unknown arguments."""
        self.refuse(arguments, encoder_hidden_states)
        if self.mixer_name == "softmax" and self.processor._parallel_config is not None:
            return super().forward(hidden_states, None, attention_mask, rotary_emb)  # these tokens are not all of them
        x = self.placed(hidden_states, self.prefix)
        q, k, v = self.project(x)
        rotate = wan_rotation(rotary_emb, v.shape[-1] // self.heads)
        how = self.preparation(q, rotate)
        q, k, v = (split_heads(t, self.heads) for t in (self.norm_q(q, *how), self.norm_k(k, *how), v))
        turned = {"prepared": True} if how else {"rotate": rotate}
        ctx = Context(x=x, grid=self.grid, prefix=self.prefix, mask=attention_mask, **turned)
        return self.output(self.mixer(q, k, v, ctx).type_as(q))

    def preparation(self, q: Tensor, rotate: Rotation | None) -> tuple:
        """What the norms of q and k do besides where one kernel can: whether to take the positive part, (cos, sin)."""
        early = self.mixer.early_map
        ours = type(self.norm_q) is type(self.norm_k) is TokenRMSNorm and in_kernels(q)
        return () if early is None or rotate is None or not ours else (early == "relu", *rotate.tables())

    @property
    def fused(self) -> bool:
        return self.fused_projections


def wan_rotation(rotary: tuple[Tensor, Tensor] | None, width: int) -> Rotation | None:
    """Wan's rotary embedding (cos, sin) [1, N, 1, D] as a function [B, N, H, W] -> [B, N, H, W]; None without.

    W is `width` = D or a multiple of it (feature maps that widen): each D channels are rotated alike.
    """
    if rotary is None:
        return None
    cos, sin = rotary[0][..., 0::2].unsqueeze(-2), rotary[1][..., 1::2].unsqueeze(-2)  # [1, N, 1, 1, D / 2]

    def rotate(t: Tensor) -> Tensor:
        even, odd = t.unflatten(-1, (-1, width // 2, 2)).unbind(-1)
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
        return turned.flatten(-3).type_as(t)

    return Rotation(rotate, lambda: (cos[0, :, 0, 0], sin[0, :, 0, 0]))


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
        x = self.placed(hidden_states, self.prefix)
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
