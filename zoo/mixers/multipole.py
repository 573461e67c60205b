"""Softmax attention with a near field and an expanded far field, linear in the number of tokens."""

from dataclasses import replace

from torch import Tensor

import hla_kernels
from zoo.grid import Grid
from zoo.mixers.base import LinearMixer
from zoo.mixers.context import Context
from zoo.mixers.mixing import choose_blocks
from zoo.mixers.options import MultipoleOptions


class Multipole(LinearMixer):
    """o_t = sum_j w_tj v_j / sum_j w_tj: w = exp(s_tj) for near tokens, exp(a_tb) (1 + s_tj - a_tb) for j in block b.

    s_tj = scale q_t.k_j, a_tb its mean over a block of the token grid. Near are tokens within `radius` along every axis
    of the grid, and class, register and text tokens, which are near to all. The tokens need a grid; blocks that do not
    divide it differ by one token along an axis. Without `blocks`, they are chosen for the grid of the host
    (`zoo.mixers.mixing.choose_blocks`).

    A token's multiplications a head: M (D + Dv) + M D Dv for M blocks with degree 1, M D (D + 3) / 2 Dv in the place of
    M D Dv with degree 2, and the near ones.
    Options: `zoo.mixers.options.MultipoleOptions`. The operator: hla_kernels.softmax.multipole.
    """

    name = "multipole"
    operator = staticmethod(hla_kernels.multipole)
    defaults = MultipoleOptions(feature_map="identity", normalize=True)
    options: MultipoleOptions
    needs_layout = True

    def __init__(
        self, dim: int, num_heads: int, head_dim: int, *, grid: Grid | None = None, prefix: int = 0, device=None,
        dtype=None, **kwargs,
    ) -> None:  # fmt: skip
        """grid: that of the host, for which blocks are chosen.  prefix: its number of class and register tokens.

        Raises ValueError without blocks and without a grid.
        """
        super().__init__(dim, num_heads, head_dim, device=device, dtype=dtype, **kwargs)
        opt = self.options
        if opt.blocks is None and grid is None:
            raise ValueError(f"the mixer {self.name!r} needs blocks=, such as [4, 4]: its host has no grid of its own")
        self.grid = grid
        self.blocks = opt.blocks or choose_blocks(tuple(grid or ()))
        self.options = replace(opt, blocks=self.blocks)
        if len(self.blocks) != opt.grid_dims:
            raise ValueError(f"blocks={list(self.blocks)} must have one number for each of {opt.grid_dims} axes")

    @property
    def chosen(self) -> dict[str, list[int]]:
        """The options that were taken from the host, as they are saved with a model."""
        return {"blocks": list(self.blocks)}

    @property
    def layout(self) -> str:
        """The blocks in words, for reports."""
        return "x".join(map(str, self.blocks)) + (" of " + "x".join(map(str, self.grid)) if self.grid else "")

    def _core(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        q, k, v = self.convolved(q, k, v, ctx)
        if ctx.rotate is not None:
            q, k = ctx.rotate(q), ctx.rotate(k)
        grid, opt = ctx.grid, self.options
        assert grid is not None
        if len(grid) != len(self.blocks) or any(m > n for m, n in zip(self.blocks, grid, strict=True)):
            raise ValueError(
                f"the tokens lie on the grid {grid}, which cannot be cut into the blocks {self.blocks} of the mixer "
                f"{self.name!r}; convert with blocks={list(choose_blocks(grid))}"
            )
        return self.operate(
            q, k, v, grid=grid, blocks=self.blocks, radius=opt.radius, degree=opt.degree, prefix=ctx.prefix,
            suffix=ctx.suffix, q_scale=self.scale, key_padding_mask=ctx.key_padding_mask,
        )  # fmt: skip
