"""MHLA block mixing: each block of queries reads a learned mixture of the moments of all blocks."""

from collections.abc import Callable
from dataclasses import dataclass

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
    """Options of `mhla` and `mhla2`.

    Raises ValueError for center, mean_path, decay, ridge and scan, and for a value that is not allowed.

    order: order of the moments, "la", "ahla" or "hla2" (`hla_kernels.mhla`)
    mixing: parametrisation of the mixing matrix, "softmax", "project", "distance" or "fixed"
      (`zoo.mixers.block_mixing.BlockMixing`)
    prior: initial mixing, "linear", "cos", "exp", "gaussian", "local" or "uniform"
    per_head: one mixing matrix per head instead of one for all heads
    """

    refused = ("center", "mean_path", "decay", "ridge")

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
        if self.causal == "frame" and self.order != "la":
            raise ValueError(f"block mixing with causal='frame' is for order='la', got {self.order!r}")
        if self.scan != "forward":
            raise ValueError("block mixing has one direction: scan must be 'forward'")
        super().__post_init__()

    @property
    def follows_grid(self) -> bool:
        return self.mixing == "distance"


class BlockMixer(BlockedMixer):
    """MHLA o_t = q (Sum_b m_ib P_b) / (q . Sum_b m_ib z_b) for the tokens t of block i, P_b = K_b'V_b, z_b = K_b'1.

    Token-level multi-head linear attention (arXiv 2601.07832), in the form of the paper: the denominator uses the query
    of the token. order="ahla" and "hla2" mix two moments of each block and multiply them. The mixing matrix m (option
    `mixing`) is initialised to a locality prior. The tokens need a grid, (H, W) or (T, H, W). Blocks that do not divide
    it differ by one token along an axis; class and register tokens form a separate block. Without `blocks`, they are
    chosen for the grid of the host (`zoo.mixers.block_mixing.choose_blocks`), and with mixing="distance" for the grid
    of each call.

    2 N D^2 + M^2 D^2 multiplications per head for M blocks, first order. Options: `BlockOptions`.
    """

    name = "mhla"
    shares_tokens = True
    operator = staticmethod(hla_kernels.mhla)
    operator_packed = staticmethod(hla_kernels.mhla_qkvpacked)
    defaults = BlockOptions()
    options: BlockOptions

    def __init__(self, layer: LayerSpec, options: BlockOptions) -> None:
        """Raises ValueError like `BlockedMixer`, and for causal blocks along another axis than the first."""
        super().__init__(layer, options)
        opt = self.options
        if opt.causal == "frame" and self.blocks[0] != 1:
            raise ValueError(f"causal='frame' needs blocks of one frame, such as [1, 3, 4], got {list(self.blocks)}")
        if opt.causal is True and any(m > 1 for m in self.blocks[1:]):
            raise ValueError(f"causal needs blocks along the first axis alone, such as [4, 1], got {list(self.blocks)}")
        heads = layer.num_heads if opt.per_head else None
        self.mixing = BlockMixing(
            opt.mixing, opt.prior, self.blocks, layer.prefix > 0, heads, opt.causal is True, **layer.placement
        )

    def project_(self) -> None:
        self.mixing.project_()

    def why_not_shared(self) -> str:
        if self.options.causal:
            return "orders the tokens inside blocks (causal), which the devices cut"
        return super().why_not_shared()

    @property
    def fusable_map(self) -> str | None:
        # not with a denominator, which needs unrotated features, nor with gains, which calibration solves from q and k
        opt = self.options
        fusible = not opt.normalize and not opt.gains and not set(opt.depthwise) & set("qk")
        return opt.feature_map if fusible and opt.feature_map in ("identity", "relu") else None

    def _core(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        opt = self.options
        q, k, v = self.convolved(q, k, v, ctx)
        grid = ctx.grid
        assert grid is not None
        if (ctx.prefix > 0) != self.mixing.prefix or ctx.suffix:
            raise ValueError(
                f"the mixer {self.name!r} was built for {self.prefix} prefix tokens before the grid and no suffix "
                f"tokens, got {ctx.prefix} and {ctx.suffix}"
            )
        blocks = opt.blocks_of(grid)
        self.check_blocks(grid, blocks)
        layout = {
            "mixing": self.mixing(blocks), "grid": grid, "blocks": blocks, "prefix": ctx.prefix, "order": opt.order,
            "causal": opt.causal, "token_mask": ctx.key_padding_mask,
        }  # fmt: skip
        if opt.feature_map == "identity":
            layout["q_scale"] = self.scale
        ratio = {"feature_map": self._inner_map, "normalize": opt.normalize, "eps": EPS}
        if ctx.qkv is not None and self._reads_packed(ctx):
            return self._streamed("weights", ctx.qkv, **layout, **ratio)
        if ctx.prepared:
            return self._streamed("weights", q, k, v, **layout, feature_map=None, normalize=False)
        q, k = self._projected(q, k)
        if ctx.rotate is None:
            return self._streamed("weights", q, k, v, **layout, **ratio)
        rotate, bounded = ctx.rotate, opt.normalize and opt.feature_map == "power"
        if isinstance(rotate, Rotation) and not bounded and not (tables := rotate.tables())[0].requires_grad:
            return self._streamed("weights", q, k, v, rotary=tables, rotary_half=rotate.half, **layout, **ratio)
        return self._rotate_outside(q, k, v, rotate, layout)

    def _rotate_outside(
        self, q: Tensor, k: Tensor, v: Tensor, rotate: Callable[[Tensor], Tensor], layout: dict[str, object]
    ) -> Tensor:
        """Rotate before the operator, which computes no gradient of learned rotary embeddings. `power` with `normalize`
        needs a separate denominator, too."""
        q, k = feature(q, self._inner_map), feature(k, self._inner_map)
        layout |= {"feature_map": None, "normalize": False}
        o = self._streamed("weights", rotate(q), rotate(k), v, **layout)
        if not self.options.normalize:
            return o
        invariant, ones = self._rotation_invariant(rotate), v.new_ones(ONES).expand(*v.shape[:-1], ONES)
        return o / (self._streamed("sums", invariant(q), invariant(k), ones, **layout)[..., :1] + EPS)


class SecondOrderBlockMixer(BlockMixer):
    """`mhla` with order="hla2": each block of queries reads (Sum_b m_ib K_b'K_b)(Sum_b m_ib Q_b'V_b).

    3 N D^2 + 2 M^2 D^2 + M D^3 multiplications per head for M blocks.
    """

    name = "mhla2"
    defaults = BlockOptions(order="hla2")
