"""Softmax attention as a mixer: the control of every experiment and the test of every backbone."""

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.mixers.context import Context
from zoo.names import unknown_name


class Softmax(nn.Module):
    """o = softmax(q k' scale) v, [B, N, H, D] -> [B, N, H, D]; cost 4 N^2 D a head.

    The one mixer that honours attention masks. It takes no options: raises ValueError for any.
    """

    name = "softmax"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        attn_drop: float = 0.0,
        device=None,
        dtype=None,
        **options,
    ) -> None:
        super().__init__()
        for option in options:
            raise unknown_name("softmax option", option, ("attn_drop", "scale"))
        self.scale = scale
        self.attn_drop = attn_drop

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        if ctx.rotate is not None:
            q, k = ctx.rotate(q), ctx.rotate(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, N, D]
        drop = self.attn_drop if self.training else 0.0
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=ctx.mask, dropout_p=drop, is_causal=ctx.is_causal, scale=self.scale
        )
        return o.transpose(1, 2)
