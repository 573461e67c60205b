"""Block mixing (MHLA): each block of queries reads its own mixture of the moments of all blocks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import hla_kernels
from hla_kernels.features import feature
from zoo.errors import unknown_name
from zoo.mixers.base import EPS, ONES
from zoo.mixers.block_mixing import BlockedMixer, BlockedOptions, BlockMixing
from zoo.mixers.context import Context, LayerSpec, Rotation

ORDERS = ("la", "ahla", "hla2")
MIXINGS = ("softmax", "project", "distance", "fixed")
PRIORS = ("linear", "cos", "exp", "gaussian", "local", "uniform")


@dataclass(frozen=True)
class BlockOptions(BlockedOptions):
    """Options of `mhla` and `mhla2`: without centring, mean path, decay, ridge and scan. Raises ValueError for these
    and for a value that is not allowed.

    order: order of the moments, "la", "ahla" or "hla2" (`hla_kernels.mhla`)
    mixing: "softmax", "project", "distance" or "fixed" (`zoo.mixers.block_mixing.BlockMixing`)
    prior: initial mixing, "linear", "cos", "exp", "gaussian", "local" or "uniform"
    per_head: one mixing matrix per head instead of one for all heads
    """

    order: str = "la"
    mixing: str = "softmax"
    prior: str = "linear"
    per_head: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("order", ORDERS), ("mixing", MIXINGS), ("prior", PRIORS)):
            if getattr(self, name) not in allowed:
                raise unknown_name(name, getattr(self, name), allowed)
        if not isinstance(self.per_head, bool) or (self.per_head and self.mixing == "fixed"):
            raise ValueError(f"per_head must be True or False, and False for mixing='fixed', got {self.per_head!r}")
        for name in ("center", "mean_path", "decay", "ridge"):
            if getattr(self, name):
                raise ValueError(f"block mixing has no {name}, got {name}={getattr(self, name)!r}")
        if self.scan != "forward":
            raise ValueError("block mixing has one direction, scan must be 'forward'")
        super().__post_init__()

    @property
    def follows_grid(self) -> bool:
        return self.mixing == "distance"


class BlockMixer(BlockedMixer):
    """o_t = q (Sum_b m_ib P_b) / (q . Sum_b m_ib z_b) for the tokens t of block i, P_b = K_b'V_b, z_b = K_b'1.

    MHLA (token-level multi-head linear attention), in the paper's form: the denominator is of the token's own query.
    order="ahla" and "hla2" mix two moments of each block and read their product. The mixing matrix is learned (option
    `mixing`), a locality prior at first. The tokens need a grid, (H, W) or (T, H, W); blocks that do not divide it
    differ by one token along an axis; class and register tokens are a block of their own. Without `blocks`, they are
    chosen for the grid of the host (`zoo.mixers.block_mixing.choose_blocks`), and with mixing="distance" for that of a
    call.

    4 N D^2 + 2 M^2 D^2 operations a head for M blocks, first order. Options: `BlockOptions`.
    """

    name = "mhla"
    operator = staticmethod(hla_kernels.mhla)
    operator_packed = staticmethod(hla_kernels.mhla_qkvpacked)
    defaults = BlockOptions()
    options: BlockOptions

    def __init__(self, layer: LayerSpec, options: BlockOptions) -> None:
        """Raises ValueError also for causal blocks along another axis than the first."""
        super().__init__(layer, options)
        opt = self.options
        if opt.causal and any(m > 1 for m in self.blocks[1:]):
            raise ValueError(f"causal needs blocks along the first axis alone, such as [4, 1], got {list(self.blocks)}")
        heads = layer.num_heads if opt.per_head else None
        self.mixing = BlockMixing(
            opt.mixing, opt.prior, self.blocks, layer.prefix > 0, heads, opt.causal, **layer.placement
        )

    def project_(self) -> None:
        self.mixing.project_()

    @property
    def early_map(self) -> str | None:
        """The feature map where nothing comes between it and the rotation: no ratio, whose divisor reads features that
        are not rotated, and no gain, which calibration solves for with the queries and keys themselves."""
        opt = self.options
        alone = not opt.normalize and not opt.gains and not set(opt.depthwise) & set("qk")
        return opt.feature_map if alone and opt.feature_map in ("identity", "relu") else None

    def _core(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        opt = self.options
        q, k, v = self.convolved(q, k, v, ctx)
        grid = ctx.grid
        assert grid is not None
        if (ctx.prefix > 0) != self.mixing.prefix or ctx.suffix:
            raise ValueError(
                f"the mixer {self.name!r} was built for {self.prefix} prefix tokens before the grid and none "
                f"behind it, not for {ctx.prefix} and {ctx.suffix}"
            )
        blocks = opt.blocks_of(grid)
        self.check_blocks(grid, blocks)
        where = {
            "mixing": self.mixing(blocks), "grid": grid, "blocks": blocks, "prefix": ctx.prefix, "order": opt.order,
            "causal": opt.causal, "token_mask": ctx.key_padding_mask,
        }  # fmt: skip
        if opt.feature_map == "identity":
            where["q_scale"] = self.scale
        ratio = {"feature_map": self._inner_map, "normalize": opt.normalize, "eps": EPS}
        if ctx.qkv is not None and self._reads_packed(ctx):
            return self.operate(ctx.qkv, **where, **ratio)
        if ctx.prepared:
            return self.operate(q, k, v, **where, feature_map=None, normalize=False)
        q, k = self._projected(q, k)
        if ctx.rotate is None:
            return self.operate(q, k, v, **where, **ratio)
        rotate, bounded = ctx.rotate, opt.normalize and opt.feature_map == "power"
        if isinstance(rotate, Rotation) and not bounded and not (tables := rotate.tables())[0].requires_grad:
            return self.operate(q, k, v, rotary=tables, rotary_half=rotate.half, **where, **ratio)
        return self._turned(q, k, v, rotate, where)

    def _turned(self, q: Tensor, k: Tensor, v: Tensor, rotate: Callable[[Tensor], Tensor], where: dict) -> Tensor:
        """The same with a learned rotary embedding, through which the operator has no gradient, and for ratios of
        `power`, whose denominator is one of its own."""
        q, k = feature(q, self._inner_map), feature(k, self._inner_map)
        where |= {"feature_map": None, "normalize": False}
        o = self.operate(rotate(q), rotate(k), v, **where)
        if not self.options.normalize:
            return o
        bounding, ones = self._bounding(rotate), torch.ones_like(v[..., :1]).expand(*v.shape[:-1], ONES)
        return o / (self.operate(bounding(q), bounding(k), ones, **where)[..., :1] + EPS)


class SecondOrderBlockMixer(BlockMixer):
    """`mhla` with order="hla2": each block of queries reads (Sum_b m_ib K_b'K_b)(Sum_b m_ib Q_b'V_b)."""

    name = "mhla2"
    defaults = BlockOptions(order="hla2")
