"""Multipole attention: exact softmax weights where they matter, an approximation of the other tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

import hla_kernels
from hla_kernels.softmax.adaptive.call import FARS, SELECTS, check_adaptive
from zoo.errors import unknown_name
from zoo.mixers.block_mixing import BlockedMixer, BlockedOptions
from zoo.mixers.context import Context, LayerSpec
from zoo.mixers.options import MixerConfig
from zoo.mixers.protocol import Mixer

BRANCHES = ("la", "ahla", "hla2", "hla3", "mhla")
OF_NEAR = ("blocks", "radius", "degree")  # options of select="near"; branch="mhla" has blocks, too
OF_TILES = ("density", "q_tile", "k_tile", "far", "branch")  # options of all other values of select


@dataclass(frozen=True)
class MultipoleOptions(BlockedOptions):
    """Options of `multipole`.

    Raises ValueError for feature_map, center, mean_path and causal, and for a value that is not allowed.

    select: which tokens are exact: key tiles chosen per query tile and head by expected error ("error"), mass ("mass")
        or score of the means ("mean"), or "near" tokens. blocks, radius and degree belong to "near", and imply it if
        select is not given; density, q_tile, k_tile, far and branch belong to the other values. branch="mhla"
        has blocks, too
    density: fraction of exact key tiles, above 0; 1 is softmax; or a list with one value per attention layer
    q_tile: maximum number of tokens of a query tile, a power of two
    k_tile: maximum number of tokens of a key tile, a power of two
    far: approximation of the other tokens, "mean", "variance", "first" or "none" (`hla_kernels.adaptive_multipole`)
    branch: linear mixer of all tokens, such as "la" or "ahla", whose output is added times a learned gain per channel,
        zero at initialisation; "" for none. With far="none" this is close to sparse-linear attention (SLA, arXiv
        2509.24006), whose linear part reads only tokens of medium weight and has a projection
    radius: tokens within this distance along every axis of the grid are near, and exact
    degree: degree of the expansion of the other tokens around the mean key of their block, 0, 1 or 2
    """

    two_sided = True

    radius: int = 2
    degree: int = 1
    select: str = "error"
    density: float | tuple[float, ...] = 0.125
    q_tile: int = 64
    k_tile: int = 16
    far: str = "first"
    branch: str = ""

    def __post_init__(self) -> None:
        for name, allowed in (("select", SELECTS), ("far", FARS)):
            if getattr(self, name) not in allowed:
                raise unknown_name(name, getattr(self, name), allowed)
        for density in self.density if isinstance(self.density, tuple) else (self.density,):
            check_adaptive(density, self.q_tile, self.k_tile)
        self._check_select()
        if self.branch not in ("", *BRANCHES):
            raise unknown_name("branch", self.branch, BRANCHES)
        if type(self.radius) is not int or self.radius < 0:
            raise ValueError(f"radius must be a number of tokens of at least 0, got {self.radius!r}")
        if type(self.degree) is not int or self.degree not in (0, 1, 2):
            raise ValueError(f"degree must be 0, 1 or 2, got {self.degree!r}")
        super().__post_init__()

    @classmethod
    def completed(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        near = OF_NEAR[1:] if given.get("branch") == "mhla" else OF_NEAR
        implied = "select" not in given and any(name in given for name in near)
        return {**given, "select": "near"} if implied else given

    def _check_select(self) -> None:
        """Raise ValueError for an option that `select` does not have."""
        near = self.select == "near"
        foreign = OF_TILES if near else OF_NEAR[1:] if self.needs_blocks else OF_NEAR
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in foreign and value != f.default:
                other = "select='error', 'mass' or 'mean'" if near else "select='near'"
                raise ValueError(
                    f"{f.name} is an option of {other}, got select={self.select!r} with {f.name}={value!r}"
                )

    def density_of(self, layer: LayerSpec) -> float:
        """Return the density of an attention layer. Raises ValueError unless a list has one value per layer."""
        if not isinstance(self.density, tuple):
            return self.density
        values, layers = len(self.density), layer.num_layers or max(len(self.density), layer.layer_index + 1)
        if values != layers:
            raise ValueError(f"density lists {values} values for {layers} attention layers: give one per layer")
        return self.density[layer.layer_index]

    @property
    def needs_blocks(self) -> bool:
        return self.select == "near" or self.branch == "mhla"

    @property
    def follows_grid(self) -> bool:
        return not self.needs_blocks

    def _check_normalize(self) -> None:
        if self.feature_map != "identity" or self.center or self.mean_path or self.normalize is not True:
            raise ValueError(
                "multipole approximates softmax weights: feature_map='identity', normalize=True, center=None and "
                f"mean_path=False are fixed, got {self.feature_map!r}, "
                f"{self.normalize}, {self.center!r} and {self.mean_path}"
            )


class Multipole(BlockedMixer):
    """Multipole attention o_t = sum_j w_tj v_j / sum_j w_tj: exact weights where they matter, others approximated.

    By default w_tj = exp(s_tj), s_tj = scale q_t.k_j, for the key tiles whose pooling would have the largest expected
    error, the fraction `density` of all tiles; other tiles are pooled (`hla_kernels.adaptive_multipole`). (0.19 + 2
    density) N^2 D multiplications per head.

    select="near": exact for tokens within `radius` along every axis of the grid, else w_tj = exp(a_tb) (1 + s_tj -
    a_tb) for j in block b, with a_tb the mean of s_tj over the block. Blocks that do not divide the grid differ by one
    token along an axis. Without `blocks`, they are chosen for the grid of the host
    (`zoo.mixers.block_mixing.choose_blocks`). 3 N^2 D multiplications per head. In both, class, register and text
    tokens are exact. Options: `MultipoleOptions`. Operators: hla_kernels.softmax.adaptive and multipole.
    """

    name = "multipole"
    shares_tokens = True
    operator = staticmethod(hla_kernels.multipole)
    defaults = MultipoleOptions(feature_map="identity", normalize=True)
    options: MultipoleOptions

    def __init__(self, layer: LayerSpec, options: MultipoleOptions) -> None:
        super().__init__(layer, options)
        self.density = options.density_of(layer)  # `zoo.diffusion.density` changes it between steps
        self.branch: Mixer | None = None
        if options.branch:
            blocked = {"blocks": self.blocks, "grid_dims": options.grid_dims} if options.needs_blocks else {}
            self.branch = MixerConfig.parse(options.branch, blocked).build(layer)
            self.branch_gain = nn.Parameter(torch.empty(layer.num_heads, layer.head_dim, **layer.placement))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.branch is not None:
            nn.init.zeros_(self.branch_gain)

    @property
    def takes_text(self) -> bool:
        alone = self.gate is None and self.norm is None  # gate, norm and blocks are for image tokens only
        return not self.options.needs_blocks and alone

    @property
    def layout(self) -> str:
        opt = self.options
        chosen = f"{self.density:.4g} of tiles of {opt.k_tile} by {opt.select}"
        chosen += f", {super().layout}" if opt.needs_blocks else ""
        return super().layout if opt.select == "near" else chosen

    def _core(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        q, k, v = self.convolved(q, k, v, ctx)
        o = self._multipole(q, k, v, ctx)
        if self.branch is None:
            return o
        return o + (self.branch_gain * self.branch(q, k, v, replace(ctx, qkv=None))).to(o.dtype)

    def _multipole(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        if ctx.rotate is not None:
            q, k = ctx.rotate(q), ctx.rotate(k)
        grid, opt = ctx.grid, self.options
        assert grid is not None
        if opt.select != "near" and self.density == 1:  # the same to rounding, and faster
            mask = ctx.key_padding_mask
            return self.run(hla_kernels.softmax_attention, q, k, v, scale=self.scale, key_padding_mask=mask)
        if opt.select != "near":
            if torch.jit.is_tracing():  # torch.jit has no scatter of a boolean
                raise ValueError("torch.jit.trace cannot trace adaptive multipole: use torch.export.export(model, ...)")
            return self.run(
                hla_kernels.adaptive_multipole, q, k, v, select=opt.select, density=self.density, q_tile=opt.q_tile,
                k_tile=opt.k_tile, far=opt.far, grid=grid, prefix=ctx.prefix, suffix=ctx.suffix, q_scale=self.scale,
                key_padding_mask=ctx.key_padding_mask,
            )  # fmt: skip
        self.check_blocks(grid, self.blocks)
        return self.operate(
            q, k, v, blocks=self.blocks, radius=opt.radius, degree=opt.degree, grid=grid, prefix=ctx.prefix,
            suffix=ctx.suffix, q_scale=self.scale, key_padding_mask=ctx.key_padding_mask,
        )  # fmt: skip
