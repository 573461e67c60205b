"""Triple attention: products of two scores per pair of tokens, by a state of third order."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hla_kernels.features import feature
from hla_kernels.sequences import real
from zoo.mixers.base import EPS
from zoo.mixers.context import Context, LayerSpec
from zoo.mixers.moments import MomentMixer, apply_matrix, product
from zoo.mixers.strassen import ProductOptions


@dataclass(frozen=True)
class TripleOptions(ProductOptions):
    """Options of `triple`. Raises ValueError for center, mean_path and values that are not allowed.

    width: channels per head of the second queries and keys
    """

    width: int = 16

    def __post_init__(self) -> None:
        if type(self.width) is not int or self.width < 1:
            raise ValueError(f"width must be a positive number of channels, got {self.width!r}")
        super().__post_init__()


class Triple(MomentMixer):
    """Triple attention: average of v_j with the weights (q_t.k_j) (r_t.l_j), second queries r and keys l.

    As in github.com/vpuri3/FLARE.py, with features and a ratio by default. The state is sum_j k_j (x) l_j (x) v_j, D x
    width x D numbers, linear in the number of tokens. q and k are features as in `la`. r and l are constant plus a
    projection of the hidden states, zero at initialisation, where the mixer equals `la`; relu keeps them positive
    unless feature_map="identity". Without `normalize` the sum is divided by the number of tokens. A rotary embedding
    rotates q and k in the numerator.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; 2 width N D^2 multiplications per head. Options:
    `TripleOptions`.
    """

    name = "triple"
    defaults = TripleOptions()
    options: TripleOptions

    def __init__(self, layer: LayerSpec, options: TripleOptions) -> None:
        super().__init__(layer, options)
        width, dim, dd = options.width, layer.dim, layer.placement
        self.extra_q = nn.Parameter(torch.empty(layer.num_heads * width, dim, **dd))
        self.extra_k = nn.Parameter(torch.empty(layer.kv_heads * width, dim, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.extra_q)
        nn.init.zeros_(self.extra_k)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        q, k, v = self.convolved(q, k, v, ctx)
        mask, signed = ctx.key_padding_mask, self.options.feature_map == "identity"
        q, k = (feature(t, self._inner_map) for t in self._projected(q, k))
        r, l = (self._second(w, ctx.x.to(v.dtype), signed) for w in (self.extra_q, self.extra_k))
        k, l, v = (real(t, mask) for t in (k, l, v))
        count = self.total_count(q.shape[1] if mask is None else mask.sum(1)[:, None, None, None], q)
        rotated_q, rotated_k = (t if ctx.rotate is None else ctx.rotate(t) for t in (q, k))
        tensors = rotated_q, r, rotated_k, l, v, count
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # products of k, l, v are not kept
            o = checkpoint(self._sums, *tensors, use_reentrant=False)
        else:
            o = self._sums(*tensors)
        if self.options.normalize:
            bound = (lambda t: t) if ctx.rotate is None else self._rotation_invariant(ctx.rotate)
            total = apply_matrix(bound(q), self.total(product(bound(k), l)) / count)
            o = o / ((total * r).sum(-1, keepdim=True) + EPS)
        return real(o * self.scale if signed else o, mask).to(v.dtype)

    def _second(self, weight: Tensor, x: Tensor, signed: bool) -> Tensor:
        """Compute the second queries or keys [B, N, heads, width], whose initial products are one."""
        width = self.options.width
        x = width**-0.5 + F.linear(x, weight.to(x.dtype)).unflatten(-1, (-1, width))
        return x if signed else x.relu()

    def _sums(self, q: Tensor, r: Tensor, k: Tensor, l: Tensor, v: Tensor, count: int | Tensor) -> Tensor:
        """Compute sum_j (q_t.k_j) (r_t.l_j) v_j / count for q, k [B, N, .., D], r, l [B, N, .., width]."""
        pairs = (l[..., :, None] * v[..., None, :]).flatten(-2)
        read = apply_matrix(q, self.total(product(k, pairs)) / count).unflatten(-1, (l.shape[-1], -1))
        return torch.einsum("bnhr,bnhre->bnhe", r, read)
