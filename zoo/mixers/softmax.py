"""Softmax attention as a mixer, the control of every experiment, also over a window of frames."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.mixers.context import Context, LayerSpec
from zoo.mixers.options import LocalOptions
from zoo.mixers.protocol import Mixer


@dataclass(frozen=True)
class SoftmaxOptions(LocalOptions):
    """Options of `softmax`. Raises ValueError for a value that is not allowed.

    causal: "frame": tokens attend to their own frame (the first axis of the grid) and to earlier ones
    window: number of frames that a token attends to, its own included; 0 for all. A streamed video keeps the keys and
      values of one frame less
    """

    causal: bool | str = False
    window: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.causal not in (False, "frame"):
            raise ValueError(f"causal must be False or 'frame', got {self.causal!r}")
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 0:
            raise ValueError(f"window must be a number of frames, or 0 for all, got {self.window!r}")
        if self.window and not self.causal:
            raise ValueError("window needs causal='frame'")
        if self.causal and (self.depthwise or self.lepe or self.cpe):
            raise ValueError("causal='frame' excludes depthwise, lepe and cpe, which read later frames")

    @property
    def needs_grid(self) -> bool:
        return self.has_convolution or bool(self.causal)


class Earlier(NamedTuple):
    """Keys and values [B, m, Hk, D] of earlier frames of a streamed video."""

    k: Tensor
    v: Tensor

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(x.numel() * x.element_size() for x in self)


class Softmax(Mixer):
    """Softmax attention o = softmax(q k' scale) v.

    Vaswani et al., arXiv 1706.03762, Eq. 1. The only mixer that supports attention masks. q, k, v, o are [B, N, H, D];
    2 N^2 D multiplications per head, with a window of w frames of n tokens 2 w n N D. Options: `SoftmaxOptions`. Raises
    ValueError for a missing grid, and for frames with a mask.
    """

    name = "softmax"
    defaults = SoftmaxOptions()
    options: SoftmaxOptions
    forms_matrix = True
    takes_rotations = True

    def __init__(self, layer: LayerSpec, options: SoftmaxOptions) -> None:
        super().__init__(layer, options)
        self.sdpa_scale = layer.scale  # None: computed by torch, for bitwise equality with the host
        self.groups = layer.num_heads // layer.kv_heads
        self.attn_drop, self.fused = layer.attn_drop, layer.fused

    @property
    def takes_text(self) -> bool:
        return True

    def why_not_shared(self) -> str:  # diffusers implements context parallelism of softmax
        return super().why_not_shared() if self.options.needs_grid else ""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        self.check(q.shape[1], ctx)
        q, k, values = self.convolved(q, k, v, ctx)
        if ctx.rotate is not None:
            q, k = ctx.rotate(q), ctx.rotate(k)
        o = self._over_frames(q, k, values, ctx) if self.options.causal else self._attend(q, k, values, ctx)
        return self.with_lepe(o, v, ctx)

    def _over_frames(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """Attend frame by frame to the frames of the window."""
        if ctx.prefix or ctx.suffix or ctx.mask is not None or ctx.key_padding_mask is not None:
            raise ValueError("softmax with causal='frame' has no class or text tokens and no mask")
        assert ctx.grid is not None
        frame, window = math.prod(ctx.grid[1:]), self.options.window
        if self.states is not None and (earlier := self.states.get("frames")) is not None:
            k, v = (torch.cat([old, new], 1) for old, new in zip(earlier, (k, v), strict=True))
        ends = range(k.shape[1] - q.shape[1] + frame, k.shape[1] + 1, frame)
        seen = [slice(max(0, end - window * frame) if window else 0, end) for end in ends]
        parts = zip(q.split(frame, 1), seen, strict=True)
        o = torch.cat([self._attend(one, k[:, s], v[:, s], ctx) for one, s in parts], 1)
        if self.states is not None:
            kept = slice(max(0, k.shape[1] - (window - 1) * frame) if window else 0, None)
            self.states["frames"] = Earlier(k[:, kept].clone(), v[:, kept].clone())
        return o

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        if self.groups > 1:  # after the rotation, as in the hosts, so that gradients are summed in the same order
            k, v = (x.repeat_interleave(self.groups, dim=2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, N, D]
        drop = self.attn_drop if self.training else 0.0
        mask = ctx.mask if ctx.key_padding_mask is None else ctx.key_padding_mask[:, None, None]
        if not self.fused:
            return self._explicit(q, k, v, mask, ctx.is_causal, drop).transpose(1, 2)
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=drop, is_causal=ctx.is_causal, scale=self.sdpa_scale
        )
        return o.transpose(1, 2)

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, drop: float) -> Tensor:
        """Compute softmax attention with an explicit [B, H, N, N] matrix, as in hosts without fused attention."""
        scores = q * self.scale @ k.transpose(-2, -1)
        if is_causal:
            scores = scores + scores.new_full(scores.shape[-2:], float("-inf")).triu_(1)
        elif mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        elif mask is not None:
            scores = scores + mask
        return F.dropout(scores.softmax(dim=-1), drop, self.training) @ v
