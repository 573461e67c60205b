"""Softmax attention as a mixer, the control of every experiment."""

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.mixers.context import Context, LayerSpec
from zoo.mixers.options import LocalOptions
from zoo.mixers.protocol import Mixer


class Softmax(Mixer):
    """Softmax attention o = softmax(q k' scale) v.

    The only mixer that supports attention masks. q, k, v, o are [B, N, H, D]; 2 N^2 D multiplications per head.
    Options: `zoo.mixers.options.LocalOptions`. Raises ValueError for a missing grid.
    """

    name = "softmax"
    forms_matrix = True
    takes_rotations = True

    def __init__(self, layer: LayerSpec, options: LocalOptions) -> None:
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
        o = self._attend(*self.convolved(q, k, v, ctx), ctx)
        return self.with_lepe(o, v, ctx)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        if ctx.rotate is not None:
            q, k = ctx.rotate(q), ctx.rotate(k)
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
        """Softmax attention with an explicit [B, H, N, N] matrix, as in hosts without fused attention."""
        scores = q * self.scale @ k.transpose(-2, -1)
        if is_causal:
            scores = scores + scores.new_full(scores.shape[-2:], float("-inf")).triu_(1)
        elif mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        elif mask is not None:
            scores = scores + mask
        return F.dropout(scores.softmax(dim=-1), drop, self.training) @ v
