"""Products of key-value moments: multilinear attention and Strassen-type attention of pairs of tokens."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hla_kernels.features import feature
from hla_kernels.ranks.collectives import add_together
from zoo.mixers.base import EPS
from zoo.mixers.context import Context, LayerSpec, Rotation
from zoo.mixers.moments import MomentMixer, apply_matrix, product
from zoo.mixers.options import MixerOptions

Rotate = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ProductOptions(MixerOptions):
    """Options of `strassen`. Raises ValueError for center, mean_path and values that are not allowed.

    normalize: divide phi(q) by its mean weight phi(q).mean phi(k), so that the first-order term equals `la`
    """

    two_sided = True
    refused = ("center", "mean_path")


@dataclass(frozen=True)
class MultilinearOptions(ProductOptions):
    """Options of `multilinear`. Raises ValueError for center, mean_path and values that are not allowed.

    ways: number L of moments that are multiplied
    """

    ways: int = 2

    def __post_init__(self) -> None:
        if type(self.ways) is not int or not 2 <= self.ways <= 8:
            raise ValueError(f"ways must be a number from 2 to 8, got {self.ways!r}")
        super().__post_init__()


class ProductMixer(MomentMixer):
    """Base class of mixers with L moments S_l = mean_t k_lt v_lt', where k_2, v_2, .. are further projections.

    k_l and v_l (l > 1) are added to their initial values by the weights `extra` [2 (L - 1), Hk D, C] of the hidden
    states, zero at initialisation. A subclass defines these initial values and reads the moments.
    """

    ways = 2
    options: ProductOptions

    def __init__(self, layer: LayerSpec, options: ProductOptions) -> None:
        super().__init__(layer, options)
        rows = 2 * (self.ways - 1)
        self.extra = nn.Parameter(torch.empty(rows, layer.kv_heads * layer.head_dim, layer.dim, **layer.placement))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.extra)

    def further_keys(self, k: Tensor, added: Tensor) -> Tensor:
        """Return features of k_l for keys k and the projection `added` [B, N, Hk, D]."""
        raise NotImplementedError

    def read(self, q: Tensor, moments: Tensor, values: Tensor, rotate: Rotate | None) -> Tensor:
        """Compute the output from features q [B, N, H, D], S_l [L, B, Hk, D, D] and mean v_l [L, B, Hk, D]."""
        raise NotImplementedError

    def _core(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        q, k, v = self.convolved(q, k, v, ctx)
        turn: Rotate = ctx.rotate or (lambda t: t)
        keys, values = [self._phi(k, self.phi_k)], [v]
        x, extra = ctx.x.to(v.dtype), self.extra.to(v.dtype).unflatten(0, (-1, 2))
        for w_k, w_v in extra:
            keys.append(self.further_keys(k, F.linear(x, w_k).view_as(k)))
            values.append(1 + F.linear(x, w_v).view_as(v))
        mask = ctx.key_padding_mask
        valid = torch.ones_like(k[..., :1]) if mask is None else mask[:, :, None, None].expand(*k.shape[:3], 1)
        phi_k, count = keys[0], valid[:, :, :1].sum(1, dtype=torch.float32)[..., None]  # [B, 1, 1, 1]
        pairs = [(turn(t), torch.where(valid > 0, u, 0)) for t, u in zip(keys, values, strict=True)]
        sums = [torch.stack([product(torch.cat([t, valid.to(t)], -1), u) for t, u in pairs])]
        sums += [product(valid.to(phi_k), phi_k), count]  # S_l with the sum of v_l as last row; sum of phi k; tokens
        if self.group is not None:
            sums = add_together([t.to(sums[0].dtype) for t in sums], self.group)
        count = sums[2].clamp(min=1)
        moments, mean = sums[0] / count, sums[1] / count
        q = self._phi(q.to(mean.dtype), self.phi_q)
        if self.options.normalize:
            mean = mean.transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], dim=2)  # [B, 1, H, D]
            q = q / ((q * mean).sum(-1, keepdim=True) + EPS)
        q = q.to(v.dtype)
        o = self.read(q, moments[..., :-1, :], moments[..., -1, :], ctx.rotate)
        return o if mask is None else o.where(mask[:, :, None, None], 0)

    def _phi(self, x: Tensor, learned: nn.Module) -> Tensor:
        if self._has_temperature:
            assert self.gains is not None
            x = self.gains.apply_temperature(x)
        return feature(learned(x), self._inner_map)


class Multilinear(ProductMixer):
    """L-way multilinear attention o = q (S_1 * .. * S_L), S_l = mean_t k_lt v_lt', with the elementwise product.

    The mean over L tokens of sum_d q_d k_1d .. k_Ld (v_1 * .. * v_L), without forming it. k_l and v_l (l > 1) are one
    plus a projection of the hidden states, zero at initialisation, where the mixer equals `la`. With feature_map=
    "identity", normalize=False and post_norm=True it is the form of the source, github.com/vpuri3/FLARE.py (backend
    `multilinear`).

    With a rotary embedding, channel pairs are complex numbers, k_1 and the projections are rotated, the one is not, and
    the q of a product with p projections is rotated p + 1 times, so that it depends on differences of positions only.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; (L + 1) N D^2 multiplications per head, rotated 2 L N D^2.
    Options: `MultilinearOptions`.
    """

    name = "multilinear"
    defaults = MultilinearOptions()
    options: MultilinearOptions

    def __init__(self, layer: LayerSpec, options: MultilinearOptions) -> None:
        self.ways = options.ways
        super().__init__(layer, options)
        self.reset_parameters()

    def further_keys(self, k: Tensor, added: Tensor) -> Tensor:
        return added  # the one is added to the moments

    def read(self, q: Tensor, moments: Tensor, values: Tensor, rotate: Rotate | None) -> Tensor:
        first, *further = moments.unbind()
        ones = [mean[..., None, :] for mean in values[1:].unbind()]  # moments of keys that are one
        if rotate is None:  # the gradient of Tensor.prod waits for the GPU
            return apply_matrix(q, functools.reduce(torch.mul, map(torch.add, further, ones), first))
        half = isinstance(rotate, Rotation) and rotate.half
        terms = [first]  # by number of projections
        for added, one in zip(further, ones, strict=True):
            nothing = torch.zeros_like(first)
            more = [complex_product(term, added, half) for term in [nothing, *terms]]
            terms = [term * one + other for term, other in zip([*terms, nothing], more, strict=True)]
        o = torch.zeros_like(q)
        for term in terms:
            q = rotate(q)
            o = o + apply_matrix(q, term)
        return o


class Strassen(ProductMixer):
    """Strassen-type attention mean_ij (g1 q.k_i + g2 k_i.l_j + g3 q.l_j + g4 sum_d q_d k_id l_jd) (v_i * w_j).

    The softmax-free form of arXiv 2501.19215: each output reads pairs (i, j) of tokens. It takes one D x D matrix and
    one row, o = q (g1 S diag(mean w) + g3 T diag(mean v) + g4 S * T) + g2 colsum(S * T) with S = mean k_i v_i' and
    T = mean l_j w_j'. The gates g [H, 4] are learned. l_j = phi(k_j + projection) and w_j = 1 + projection of the
    hidden states. It starts as `la`: the projections and g2, g3, g4 are zero. Form of FLARE.py (backend `strassen`):
    feature_map="identity", normalize=False, post_norm=True.

    With a rotary embedding, channel pairs are complex numbers, the fourth term is the real part of sum_d q_d conj(k_id
    l_jd), and its q is rotated twice, so that it depends on differences of positions only.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; 3 N D^2 multiplications per head, and as many for the two
    projections as for k and v. Options: `ProductOptions`.
    """

    name = "strassen"
    defaults = ProductOptions()

    def __init__(self, layer: LayerSpec, options: ProductOptions) -> None:
        super().__init__(layer, options)
        self.gates = nn.Parameter(torch.empty(layer.num_heads, 4, **layer.placement))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.gates.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0], device=self.gates.device))

    def further_keys(self, k: Tensor, added: Tensor) -> Tensor:
        return self._phi(k + added, self.phi_k)

    def read(self, q: Tensor, moments: Tensor, values: Tensor, rotate: Rotate | None) -> Tensor:
        groups = q.shape[2] // moments.shape[2]
        (s, t), (v, w) = (x.repeat_interleave(groups, dim=2).unbind() for x in (moments, values))  # per query head
        g1, g2, g3, g4 = self.gates.to(s.dtype)[..., None].unbind(1)  # [H, 1] each
        first = s * (g1 * w)[..., None, :] + t * (g3 * v)[..., None, :]
        row = (g2 * (s * t).sum(-2))[:, None].to(q.dtype)
        if rotate is None:
            return apply_matrix(q, first + g4[..., None] * s * t) + row
        half = isinstance(rotate, Rotation) and rotate.half
        once = rotate(q)
        return apply_matrix(once, first) + apply_matrix(rotate(once), g4[..., None] * complex_product(s, t, half)) + row


def complex_product(s: Tensor, t: Tensor, half: bool) -> Tensor:
    """Multiply [.., D, E] with pairs of rows as complex numbers: rows (i, i + D / 2) if `half`, else (2i, 2i + 1)."""
    pairs, axis = ((2, -1), -3) if half else ((-1, 2), -2)
    (a, b), (c, d) = (x.unflatten(-2, pairs).unbind(axis) for x in (s, t))
    return torch.stack([a * c - b * d, a * d + b * c], axis).flatten(-3, -2)
