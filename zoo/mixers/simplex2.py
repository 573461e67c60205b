"""2-simplicial attention over pairs of neighbouring tokens."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hla_kernels.trilinear.window import simplex2_window
from zoo.mixers.context import Context, LayerSpec
from zoo.mixers.options import LocalOptions
from zoo.mixers.protocol import Mixer


@dataclass(frozen=True)
class Simplex2Options(LocalOptions):
    """Options of `simplex2`. Raises ValueError for a value that is not allowed.

    radius: tokens within this distance along every axis of the grid are read
    """

    radius: int = 2

    def __post_init__(self) -> None:
        if type(self.radius) is not int or self.radius < 0:
            raise ValueError(f"radius must be a number of tokens of at least 0, got {self.radius!r}")
        super().__post_init__()

    @property
    def needs_grid(self) -> bool:
        return True


class Simplex2(Mixer):
    """2-simplicial attention o_i = sum_jk p_ijk v_j * w_k, p = softmax over (j, k) of scale sum_d q_id k_jd l_kd.

    arXiv 2507.02754, Eq. 5 to 7, with pairs (j, k) of neighbours on the grid and of class, register and text tokens;
    the queries of these read pairs of any token j and one of them, k. The further keys l and values w are one plus a
    projection of the hidden states, zero at initialisation, where the mixer equals softmax attention in its window.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; 2 N W^2 D multiplications per head for W tokens per window.
    Options: `Simplex2Options`. Raises ValueError for a missing grid, and for a rotary embedding, on which the scores of
    three vectors would depend by more than differences of positions.
    """

    name = "simplex2"
    defaults = Simplex2Options()
    options: Simplex2Options

    def __init__(self, layer: LayerSpec, options: Simplex2Options) -> None:
        super().__init__(layer, options)
        self.extra = nn.Parameter(torch.empty(2, layer.kv_heads * layer.head_dim, layer.dim, **layer.placement))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.extra)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        self.check(q.shape[1], ctx)
        assert ctx.grid is not None
        q, k, values = self.convolved(q, k, v, ctx)
        further_k, further_v = (1 + F.linear(ctx.x.to(v.dtype), w.to(v.dtype)).view_as(k) for w in self.extra)
        o = simplex2_window(
            q, k, further_k, values, further_v, grid=ctx.grid, radius=self.options.radius, scale=self.scale,
            prefix=ctx.prefix, suffix=ctx.suffix, mask=ctx.key_padding_mask,
        )  # fmt: skip
        return self.with_lepe(o, v, ctx)

    def why_not_shared(self) -> str:
        return super().why_not_shared() and "reads windows of the grid, parts of which other devices hold"
