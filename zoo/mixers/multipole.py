"""Softmax attention with a near field and an expanded far field, linear in the number of tokens."""

from dataclasses import dataclass

from torch import Tensor

import hla_kernels
from zoo.mixers.block_mixing import BlockedMixer, BlockedOptions
from zoo.mixers.context import Context


@dataclass(frozen=True)
class MultipoleOptions(BlockedOptions):
    """Options of `multipole`: without a feature map, centring, mean path and causality. Raises ValueError for these and
    for a value that is not allowed.

    radius: tokens up to this far along every axis of the grid are near, and exact
    degree: degree of the expansion of the other tokens around the mean key of their block, 0, 1 or 2
    """

    two_sided = True

    radius: int = 2
    degree: int = 1

    def __post_init__(self) -> None:
        if type(self.radius) is not int or self.radius < 0:
            raise ValueError(f"radius must be a number of tokens of at least 0, got {self.radius!r}")
        if type(self.degree) is not int or self.degree not in (0, 1, 2):
            raise ValueError(f"degree must be 0, 1 or 2, got {self.degree!r}")
        super().__post_init__()

    def _check_normalize(self) -> None:
        if self.feature_map != "identity" or self.center or self.mean_path or self.normalize is not True:
            raise ValueError(
                "multipole averages with positive sums of weights near those of softmax: feature_map='identity', "
                f"normalize=True, center=None and mean_path=False are fixed, got {self.feature_map!r}, "
                f"{self.normalize}, {self.center!r} and {self.mean_path}"
            )


class Multipole(BlockedMixer):
    """o_t = sum_j w_tj v_j / sum_j w_tj: w = exp(s_tj) for near tokens, exp(a_tb) (1 + s_tj - a_tb) for j in block b.

    s_tj = scale q_t.k_j, a_tb its mean over a block of the token grid. Near are tokens within `radius` along every axis
    of the grid, and class, register and text tokens, which are near to all. The tokens need a grid; blocks that do not
    divide it differ by one token along an axis. Without `blocks`, they are chosen for the grid of the host
    (`zoo.mixers.block_mixing.choose_blocks`).

    A token's multiplications a head: M (D + Dv) + M D Dv for M blocks with degree 1, M D (D + 3) / 2 Dv in the place of
    M D Dv with degree 2, and the near ones.
    Options: `MultipoleOptions`. The operator: hla_kernels.softmax.multipole.
    """

    name = "multipole"
    operator = staticmethod(hla_kernels.multipole)
    defaults = MultipoleOptions(feature_map="identity", normalize=True)
    options: MultipoleOptions

    def _core(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        q, k, v = self.convolved(q, k, v, ctx)
        if ctx.rotate is not None:
            q, k = ctx.rotate(q), ctx.rotate(k)
        grid, opt = ctx.grid, self.options
        assert grid is not None
        self.check_blocks(grid, self.blocks)
        return self.operate(
            q, k, v, grid=grid, blocks=self.blocks, radius=opt.radius, degree=opt.degree, prefix=ctx.prefix,
            suffix=ctx.suffix, q_scale=self.scale, key_padding_mask=ctx.key_padding_mask,
        )  # fmt: skip
