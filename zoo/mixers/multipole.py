"""Softmax attention with a near field and an expanded far field, linear in the number of tokens."""

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

import hla_kernels
from hla_kernels.softmax.adaptive.call import FARS, SELECTS, check_adaptive
from zoo.errors import unknown_name
from zoo.mixers.block_mixing import BlockedMixer, BlockedOptions
from zoo.mixers.context import Context


@dataclass(frozen=True)
class MultipoleOptions(BlockedOptions):
    """Options of `multipole`: without a feature map, centring, mean path and causality. Raises ValueError for these and
    for a value that is not allowed.

    select: which tokens are exact: "near" ones, or key tiles that are chosen for each query tile and head by their
        expected error ("error"), mass ("mass") or score of means ("mean"); blocks, radius and degree belong to near,
        the following to the others
    density: part of the key tiles that is exact, above 0; 1 is softmax
    q_tile: most tokens of a query tile, a power of two
    k_tile: most tokens of a key tile, a power of two
    far: weights of the other tokens, "mean", "variance" or "first" (`hla_kernels.adaptive_multipole`)
    radius: tokens up to this far along every axis of the grid are near, and exact
    degree: degree of the expansion of the other tokens around the mean key of their block, 0, 1 or 2
    """

    two_sided = True

    radius: int = 2
    degree: int = 1
    select: str = "near"
    density: float = 0.125
    q_tile: int = 64
    k_tile: int = 16
    far: str = "first"

    def __post_init__(self) -> None:
        for name, allowed in (("select", SELECTS), ("far", FARS)):
            if getattr(self, name) not in allowed:
                raise unknown_name(name, getattr(self, name), allowed)
        check_adaptive(self.density, self.q_tile, self.k_tile)
        self._check_select()
        if type(self.radius) is not int or self.radius < 0:
            raise ValueError(f"radius must be a number of tokens of at least 0, got {self.radius!r}")
        if type(self.degree) is not int or self.degree not in (0, 1, 2):
            raise ValueError(f"degree must be 0, 1 or 2, got {self.degree!r}")
        super().__post_init__()

    def _check_select(self) -> None:
        """Raise ValueError for an option that the other kind of choice has."""
        near = self.select == "near"
        foreign = ("density", "q_tile", "k_tile", "far") if near else ("blocks", "radius", "degree")
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in foreign and value != f.default:
                other = "select='error', 'mass' or 'mean'" if near else "select='near'"
                raise ValueError(
                    f"{f.name} is an option of {other}, got select={self.select!r} with {f.name}={value!r}"
                )

    @property
    def follows_grid(self) -> bool:
        return self.select != "near"

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

    @property
    def layout(self) -> str:
        opt = self.options
        chosen = f"{opt.density:.4g} of tiles of {opt.k_tile} by {opt.select}"
        return super().layout if opt.select == "near" else chosen

    def _core(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        q, k, v = self.convolved(q, k, v, ctx)
        if ctx.rotate is not None:
            q, k = ctx.rotate(q), ctx.rotate(k)
        grid, opt = ctx.grid, self.options
        assert grid is not None
        where: dict[str, Any] = {
            "grid": grid, "prefix": ctx.prefix, "suffix": ctx.suffix, "q_scale": self.scale,
            "key_padding_mask": ctx.key_padding_mask,
        }  # fmt: skip
        if opt.select != "near":
            return hla_kernels.adaptive_multipole(
                q, k, v, select=opt.select, density=opt.density, q_tile=opt.q_tile, k_tile=opt.k_tile, far=opt.far,
                **where,
            )  # fmt: skip
        self.check_blocks(grid, self.blocks)
        return self.operate(q, k, v, blocks=self.blocks, radius=opt.radius, degree=opt.degree, **where)
