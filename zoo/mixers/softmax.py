"""Softmax attention as a mixer: the control of every experiment and the test of every backbone."""

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.mixers.context import Context
from zoo.mixers.depthwise import Local
from zoo.mixers.options import LocalOptions, resolve_options


class Softmax(Local):
    """o = softmax(q k' scale) v, [B, N, H, D] -> [B, N, H, D]; cost 4 N^2 D a head.

    The one mixer that honours attention masks. Its options are `zoo.mixers.options.LocalOptions`: raises ValueError for
    others, and for a missing grid.
    """

    name = "softmax"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        scale: float | None = None,
        attn_drop: float = 0.0,
        fused: bool = True,
        device=None,
        dtype=None,
        **options,
    ) -> None:
        super().__init__()
        self.options = resolve_options(LocalOptions(), options, "softmax")
        heads, dd = {"q": num_heads, "k": num_kv_heads or num_heads}, {"device": device, "dtype": dtype}
        heads["v"] = heads["k"]
        self.build_cpe(dim, **dd)
        self.build_depthwise(heads, head_dim, **dd)
        self.build_lepe(heads["v"] * head_dim, **dd)
        self.scale = scale
        self.groups = num_heads // heads["k"]
        self.attn_drop = attn_drop
        self.fused = fused

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        self.check_grid(q.shape[1], ctx)
        o = self._attend(*self.convolved(q, k, v, ctx), ctx)
        return self.with_lepe(o, v, ctx)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        if ctx.rotate is not None:
            q, k = ctx.rotate(q), ctx.rotate(k)
        if self.groups > 1:  # after the rotation, as in the hosts, so that gradients are summed alike
            k, v = (x.repeat_interleave(self.groups, dim=2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, N, D]
        drop = self.attn_drop if self.training else 0.0
        mask = ctx.mask if ctx.key_padding_mask is None else ctx.key_padding_mask[:, None, None]
        if not self.fused:
            return self._explicit(q, k, v, mask, ctx.is_causal, drop).transpose(1, 2)
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=drop, is_causal=ctx.is_causal, scale=self.scale
        )
        return o.transpose(1, 2)

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, drop: float) -> Tensor:
        """The same with the [B, H, N, N] matrix, as hosts without fused attention compute it."""
        scores = q * (q.shape[-1] ** -0.5 if self.scale is None else self.scale) @ k.transpose(-2, -1)
        if is_causal:
            scores = scores + scores.new_full(scores.shape[-2:], float("-inf")).triu_(1)
        elif mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        elif mask is not None:
            scores = scores + mask
        return F.dropout(scores.softmax(dim=-1), drop, self.training) @ v
