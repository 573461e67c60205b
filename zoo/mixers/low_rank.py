"""Mixers of low rank: FLARE, Linformer, Nystromformer, Performer, RFA and efficient attention."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hla_kernels
from hla_kernels.ranks.collectives import add_ranks
from hla_kernels.sequences import real
from zoo.errors import unknown_name
from zoo.grid import join_tokens, split_tokens
from zoo.mixers.base import EPS
from zoo.mixers.context import Context, LayerSpec
from zoo.mixers.moments import apply_matrix, product, token_max, token_softmax
from zoo.mixers.options import LocalOptions
from zoo.mixers.protocol import Mixer

READERS = ("q", "k")
SMALLEST_MEAN = 0.01  # lower bound of the mean weight estimated by `rfa`, as in the published code
DEFAULT_SIDE = 16  # tokens per axis for which `linformer` stores weights if the grid is not known


@dataclass(frozen=True)
class RankOptions(LocalOptions):
    """Options of `performer` and `rfa`. Raises ValueError for a value that is not allowed.

    rank: number of random features
    """

    rank: int = 64

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"rank must be a positive number, got {self.rank!r}")
        super().__post_init__()


@dataclass(frozen=True)
class FlareOptions(RankOptions):
    """Options of `flare`. Raises ValueError for a value that is not allowed.

    rank: number of learned latents per head
    read: "k", tokens read the latents by their keys, as published; "q", by their queries, so that all projections of
      a converted model are used
    """

    read: str = "q"

    def __post_init__(self) -> None:
        if self.read not in READERS:
            raise unknown_name("read", self.read, READERS)
        super().__post_init__()


@dataclass(frozen=True)
class PooledOptions(RankOptions):
    """Options of `linformer`. Raises ValueError for a value that is not allowed.

    rank: number of weighted means of the keys and values
    """

    @property
    def needs_grid(self) -> bool:
        return True


@dataclass(frozen=True)
class NystromOptions(PooledOptions):
    """Options of `nystrom`. Raises ValueError for a value that is not allowed.

    rank: number of landmarks, means of successive tokens
    iterations: iterations of the pseudoinverse; 6 as published leave a residual of a few percent, 20 none
    """

    iterations: int = 6

    def __post_init__(self) -> None:
        if type(self.iterations) is not int or self.iterations < 0:
            raise ValueError(f"iterations must be a number of at least 0, got {self.iterations!r}")
        super().__post_init__()


class TwoSidedMixer(Mixer):
    """Base class of two-sided mixers without feature maps. A subclass defines `attend`."""

    takes_rotations: ClassVar[bool] = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        self.check(q.shape[1], ctx)
        q, k, values = self.convolved(q, k, v, ctx)
        if ctx.rotate is not None:
            q, k = ctx.rotate(q), ctx.rotate(k)
        groups = q.shape[2] // k.shape[2]
        k, values = (t.repeat_interleave(groups, dim=2) for t in (k, values))
        return self.with_lepe(real(self.attend(q, k, values, ctx), ctx.key_padding_mask), v, ctx)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """Mix q, k, v [B, N, H, D], rotated if the host has a rotation."""
        raise NotImplementedError

    def why_not_shared(self) -> str:
        reason = super().why_not_shared()
        return reason if self.shares_tokens or not reason else "pools tokens by their position in the whole sequence"


class Flare(TwoSidedMixer):
    """FLARE o_t = sum_m softmax_m(r_t.l_m) sum_j softmax_j(l_m.k_j) v_j with M learned latents l [H, M, D], r = q or k.

    arXiv 2508.12594: two calls of softmax attention through M latents, scale 1 (the latents are learned). The weights
    have rank M; a permutation of the tokens permutes the output.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; 4 N M D multiplications per head. Options: `FlareOptions`.
    """

    name = "flare"
    defaults = FlareOptions()
    shares_tokens = True
    options: FlareOptions

    def __init__(self, layer: LayerSpec, options: FlareOptions) -> None:
        super().__init__(layer, options)
        self.latents = nn.Parameter(torch.empty(layer.num_heads, options.rank, layer.head_dim, **layer.placement))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.latents, std=self.scale)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        latents = self.latents.to(k.dtype).expand(k.shape[0], -1, -1, -1).transpose(1, 2)  # [B, M, H, D]
        reader = q if self.options.read == "q" else k
        if self.group is None:
            return attention(reader, latents, attention(latents, k, v, 1.0, ctx.key_padding_mask), 1.0)
        scores = torch.einsum("bmhd,bnhd->bnhm", latents, k)
        weights, _ = token_softmax(scores, None, self.group)
        gathered = add_ranks(torch.einsum("bnhm,bnhd->bmhd", weights, v.to(weights.dtype)), self.group)
        return attention(reader, latents, gathered.to(v.dtype), 1.0)


class Efficient(TwoSidedMixer):
    """Efficient attention o_t = softmax_D(q_t) (softmax_N(K)'V): softmax over the channels of q, over the tokens of k.

    Shen et al., arXiv 1812.01243, Eq. 6. The weights are non-negative and sum to one.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; 2 N D^2 multiplications per head. Options:
    `zoo.mixers.options.LocalOptions`.
    """

    name = "efficient"
    shares_tokens = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        mask = ctx.key_padding_mask
        weights, count = token_softmax(k, mask, self.group)  # the operator divides by the number of tokens
        step = 64  # float16 ends at 65504: a weight of 1 times count / step fits up to 4 million tokens
        options = {"feature_map": "identity", "normalize": False, "q_scale": step, "key_padding_mask": mask}
        q, k = q.softmax(-1).to(v.dtype), (weights * (count / step)).to(v.dtype)
        return self.run(hla_kernels.linear_attention, q, k, v, **options)


class Performer(TwoSidedMixer):
    """Performer: softmax weights exp(scale q.k) estimated by positive random features, o = phi(q) phi(K)'V / sum.

    phi(x) = exp(w_r.y - |y|^2 / 2), y = sqrt(scale) x, for `rank` random directions w, orthogonal in blocks of D
    (FAVOR+, arXiv 2009.14794, Eq. 8 and section 2.4). They are drawn once and stored with the model. Features are
    scaled by their maxima, which leaves the output unchanged.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; 4 N R D multiplications per head for R features. Options:
    `RankOptions`. Raises ValueError for a rank above 256, the width of the operator.
    """

    name = "performer"
    defaults = RankOptions()
    shares_tokens = True
    options: RankOptions
    directions: Tensor

    def __init__(self, layer: LayerSpec, options: RankOptions) -> None:
        super().__init__(layer, options)
        if options.rank > hla_kernels.MAX_HEAD_DIM:
            raise ValueError(f"rank of performer must be at most {hla_kernels.MAX_HEAD_DIM}, got {options.rank}")
        shape = layer.num_heads, options.rank, layer.head_dim
        self.register_buffer("directions", torch.empty(shape, **layer.placement))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        heads, rank, d = self.directions.shape
        blocks, r = torch.linalg.qr(torch.randn(heads, -(-rank // d), d, d))
        blocks = blocks * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]  # uniform over the orthogonal matrices
        self.directions.copy_(blocks.flatten(1, 2)[:, :rank] * torch.randn(heads, rank, d).norm(dim=-1, keepdim=True))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        mask = ctx.key_padding_mask
        q, k = self.exponents(q), self.exponents(k)
        k = k if mask is None else k.masked_fill(~mask[:, :, None, None], torch.finfo(k.dtype).min)
        k = (k - token_max(k.amax(-1, keepdim=True), self.group)).exp().to(v.dtype)
        q = (q - q.detach().amax(-1, keepdim=True)).exp().to(v.dtype)
        options = {"feature_map": "identity", "normalize": True, "eps": EPS, "key_padding_mask": mask}
        return self.run(hla_kernels.linear_attention, q, k, v, **options)

    def exponents(self, x: Tensor) -> Tensor:
        """Compute w_r.y - |y|^2 / 2 for every direction, [B, N, H, D] -> [B, N, H, R] in at least float32."""
        y = x.to(torch.promote_types(x.dtype, torch.float32)) * self.scale**0.5
        with torch.autocast(x.device.type, enabled=False):
            along = torch.einsum("bnhd,hrd->bnhr", y, self.directions.to(y.dtype))
        return along - y.square().sum(-1, keepdim=True) / 2


class Rfa(TwoSidedMixer):
    """RFA: softmax weights exp(q.k / sigma^2) of unit vectors estimated by random Fourier features, as in Performer.

    phi(x) = [sin(w_1.x), .., sin(w_R.x), cos(w_1.x), .., cos(w_R.x)] / sqrt(R) of x / |x|, w_r = z_r / sigma with z_r
    from a unit normal distribution, drawn once and stored with the model, and sigma learned per head and channel, 1 at
    initialisation (arXiv 2103.02143, sections 2.2 and 3.1). Estimated weights may be negative; their mean, the
    denominator, is at least 0.01.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; 6 N R D multiplications per head for R directions. Options:
    `RankOptions`.
    """

    name = "rfa"
    defaults = RankOptions()
    shares_tokens = True
    options: RankOptions
    directions: Tensor

    def __init__(self, layer: LayerSpec, options: RankOptions) -> None:
        super().__init__(layer, options)
        heads, d = layer.num_heads, layer.head_dim
        self.register_buffer("directions", torch.empty(heads, options.rank, d, **layer.placement))
        self.sigma = nn.Parameter(torch.empty(heads, d, **layer.placement))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.directions)
        nn.init.ones_(self.sigma)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        mask = ctx.key_padding_mask
        q, k = self.phi(q), real(self.phi(k), mask)
        ones = torch.ones_like(v[..., :1])
        sums = product(k, torch.cat([v, ones], -1))
        count = real(ones[:, :, :1], mask).sum(1, keepdim=True, dtype=k.dtype)
        if self.group is not None:
            sums, count = add_ranks(sums, self.group), add_ranks(count, self.group)
        o = apply_matrix(q, sums / count.clamp(min=1))
        return (o[..., :-1] / o[..., -1:].clamp(min=SMALLEST_MEAN)).to(v.dtype)

    def phi(self, x: Tensor) -> Tensor:
        """Compute the features, [B, N, H, D] -> [B, N, H, 2 R] in at least float32."""
        x = F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)
        with torch.autocast(x.device.type, enabled=False):
            angle = torch.einsum("bnhd,hrd->bnhr", x / self.sigma.to(x.dtype), self.directions.to(x.dtype))
        return torch.cat([angle.sin(), angle.cos()], -1) * self.options.rank**-0.5


class Linformer(TwoSidedMixer):
    """Linformer o = softmax(scale q (E K)') F V: M learned weighted means of the keys and of the values.

    arXiv 2006.04768, Eq. 7, with E, F [M, N] shared by the heads. They are stored for the grid of the model and
    interpolated to the grid of a call; initially they average M segments of the raster order. Class, register and text
    tokens are further keys. Padded tokens count as zeros.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; 4 N M D multiplications per head. Options:
    `PooledOptions`. Raises ValueError for a missing grid.
    """

    name = "linformer"
    defaults = PooledOptions()
    options: PooledOptions

    def __init__(self, layer: LayerSpec, options: PooledOptions) -> None:
        super().__init__(layer, options)
        grid = layer.grid or (DEFAULT_SIDE,) * options.grid_dims
        self.weights = nn.Parameter(torch.empty(2, options.rank, *grid, **layer.placement))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        flat = segments(self.weights[0, 0].numel(), self.options.rank, None, self.weights.device)
        self.weights.copy_(flat.view_as(self.weights[:1]))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        assert ctx.grid is not None
        mask, prefix, suffix = ctx.key_padding_mask, ctx.prefix, ctx.suffix
        pooled = []
        for t, weights in zip((real(k, mask), real(v, mask)), self._interpolated(ctx.grid), strict=True):
            first, patches, last = split_tokens(t, ctx.grid, prefix, suffix)
            pooled.append(join_tokens(first, torch.einsum("mn,bnhd->bmhd", weights.to(t.dtype), patches), last))
        if mask is not None and prefix + suffix:
            every = mask.new_ones(mask.shape[0], self.options.rank)
            mask = torch.cat([mask[:, :prefix], every, mask[:, mask.shape[1] - suffix :]], 1)
        return attention(q, pooled[0], pooled[1], self.scale, mask if prefix + suffix else None)

    def _interpolated(self, grid: tuple[int, ...]) -> Tensor:
        """Return E and F for a grid, [2, M, tokens]."""
        stored = self.weights.shape[2:]
        if stored == grid:
            return self.weights.flatten(2)
        plane = {"mode": "bilinear", "antialias": True} if len(grid) == 2 else {"mode": "trilinear"}
        at_grid = F.interpolate(self.weights, grid, **plane).flatten(2)
        return at_grid * (stored.numel() / at_grid.shape[2])


class Nystrom(TwoSidedMixer):
    """Nystromformer o = softmax(q K~') pinv(softmax(Q~ K~')) softmax(Q~ K')V, Q~ and K~ means of M segments of tokens.

    arXiv 2102.03902, Eq. 13 to 15, without its convolution (`lepe` is the nearest option). The segments follow the
    order of the (real) tokens.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; 6 N M D + 4 i M^3 multiplications per head for i
    iterations. Options: `NystromOptions`.
    """

    name = "nystrom"
    defaults = NystromOptions()
    options: NystromOptions

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        weights = segments(k.shape[1], self.options.rank, ctx.key_padding_mask, k.device).to(k.dtype)
        few_q, few_k = (torch.einsum("bmn,bnhd->bmhd", weights.expand(t.shape[0], -1, -1), t) for t in (q, k))
        values = attention(few_q, k, v, self.scale, ctx.key_padding_mask)
        dtype = torch.promote_types(k.dtype, torch.float32)
        with torch.autocast(k.device.type, enabled=False):
            scores = torch.einsum("bmhd,blhd->bhml", few_q.to(dtype), few_k.to(dtype)) * self.scale
            inverse = pseudoinverse(scores.softmax(-1), self.options.iterations)
            values = torch.einsum("bhml,blhd->bmhd", inverse, values.to(dtype)).to(v.dtype)
        return attention(q, few_k, values, self.scale)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Softmax attention of [B, N, H, D] tensors, over the real keys of mask [B, keys]."""
    keys = None if mask is None else mask[:, None, None]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keys, scale=scale).transpose(1, 2)


def segments(n: int, m: int, mask: Tensor | None, device: torch.device) -> Tensor:
    """Weights [B or 1, M, N] of the means over M successive segments of the N tokens, or of the real tokens of mask.

    Segment i has the tokens floor(i N / M) to ceil((i + 1) N / M) - 1, as in adaptive average pooling.
    """
    i = torch.arange(m, device=device)
    if mask is None:
        position, count = torch.arange(n, device=device)[None], torch.full((1, 1), n, device=device)
    else:
        position, count = torch.where(mask, mask.cumsum(1) - 1, -1), mask.sum(1, keepdim=True)
    start, end = i * count // m, -(-(i + 1) * count // m)  # [B, M]
    inside = (position[:, None] >= start[..., None]) & (position[:, None] < end[..., None])
    return inside / inside.sum(-1, keepdim=True).clamp(min=1)


def pseudoinverse(a: Tensor, iterations: int) -> Tensor:
    """Moore-Penrose inverse of matrices [.., M, M] by an iteration of third order (arXiv 2102.03902, Eq. 11)."""
    size = a.abs().sum(-2).amax(-1) * a.abs().sum(-1).amax(-1)
    z = a.mT / size[..., None, None]
    eye = torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
    return z
