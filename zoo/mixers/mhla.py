"""Block mixing (MHLA): each block of queries reads its own mixture of the moments of all blocks."""

from collections.abc import Callable

import torch
from torch import Tensor

import hla_kernels
from hla_kernels.features import feature
from zoo.grid import Grid
from zoo.mixers.base import EPS, ONES
from zoo.mixers.block_mixing import BlockedMixer, BlockMixing, choose_blocks
from zoo.mixers.context import Context, Rotation
from zoo.mixers.options import BlockOptions


class BlockMixer(BlockedMixer):
    """o_t = q (Sum_b m_ib P_b) / (q . Sum_b m_ib z_b) for the tokens t of block i, P_b = K_b'V_b, z_b = K_b'1.

    MHLA (token-level multi-head linear attention), in the paper's form: the denominator is of the token's own query.
    order="ahla" and "hla2" mix two moments of each block and read their product. The mixing matrix is learned (option
    `mixing`), a locality prior at first. The tokens need a grid, (H, W) or (T, H, W); blocks that do not divide it
    differ by one token along an axis; class and register tokens are a block of their own. Without `blocks`, they are
    chosen for the grid of the host (`zoo.mixers.block_mixing.choose_blocks`), and with mixing="distance" for that of a
    call.

    4 N D^2 + 2 M^2 D^2 operations a head for M blocks, first order. Options: `zoo.mixers.options.BlockOptions`.
    """

    name = "mhla"
    operator = staticmethod(hla_kernels.mhla)
    operator_packed = staticmethod(hla_kernels.mhla_qkvpacked)
    defaults = BlockOptions()
    options: BlockOptions

    def __init__(
        self, dim: int, num_heads: int, head_dim: int, *, grid: Grid | None = None, prefix: int = 0, device=None,
        dtype=None, **kwargs,
    ) -> None:  # fmt: skip
        """Raises ValueError also for causal blocks along another axis than the first."""
        super().__init__(dim, num_heads, head_dim, grid=grid, prefix=prefix, device=device, dtype=dtype, **kwargs)
        opt = self.options
        if opt.causal and any(m > 1 for m in self.blocks[1:]):
            raise ValueError(f"causal needs blocks along the first axis alone, such as [4, 1], got {list(self.blocks)}")
        heads = num_heads if opt.per_head else None
        self.mixing = BlockMixing(
            opt.mixing, opt.prior, self.blocks, prefix > 0, heads, opt.causal, device=device, dtype=dtype
        )

    @property
    def early_map(self) -> str | None:
        """The map (identity or relu) that a host may apply to q and k, and then turn them, in one pass with its norms:
        where nothing else comes in between, there is no ratio, whose divisor reads features before the turn, and no
        gain, which calibration solves for with the queries and keys themselves."""
        opt = self.options
        alone = not opt.normalize and not opt.gains and not set(opt.depthwise) & set("qk")
        return opt.feature_map if alone and opt.feature_map in ("identity", "relu") else None

    @property
    def follows_grid(self) -> bool:
        return self.options.mixing == "distance"

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
        blocks = opt.blocks or choose_blocks(grid, opt.causal)
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
