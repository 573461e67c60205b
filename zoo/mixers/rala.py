"""Rank-augmented linear attention (RALA): keys are weighted by their similarity to the mean query."""

from torch import Tensor

from hla_kernels.features import feature
from zoo.mixers.base import EPS
from zoo.mixers.context import Context
from zoo.mixers.hla import LinearAttention
from zoo.mixers.layers import mean_value
from zoo.mixers.moments import token_softmax
from zoo.mixers.options import TwoSidedRatioOptions


class Rala(LinearAttention):
    """RALA: linear attention with keys alpha_j phi(k_j), alpha = N softmax_j(scale mean(phi q).phi(k_j)).

    arXiv 2411.07635, Eq. 6 to 9. The weights alpha raise the rank of K'V; the option `gate`, on by default, multiplies
    the output by a function of the hidden states, which raises the rank of the output (published: a linear map). Heads
    that share keys share alpha.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; 2 N D^2 multiplications per head. Options:
    `zoo.mixers.options.TwoSidedRatioOptions`. Raises ValueError for a map that may be negative.
    """

    name = "rala"
    defaults = TwoSidedRatioOptions(gate=True)
    options: TwoSidedRatioOptions

    def _reads_packed(self, ctx: Context) -> bool:
        return False

    def _mix(self, mask: Tensor | None, *tensors: Tensor) -> Tensor:
        if len(tensors) == 5:
            q, k, rotated_q, rotated_k, v = tensors
            alpha = self._key_weights(q, k, mask)
            k, rotated_k = ((t * alpha).to(t.dtype) for t in (k, rotated_k))
            return super()._mix(mask, q, k, rotated_q, rotated_k, v)
        q, k = (feature(t, self._inner_map) for t in tensors[:2])
        k = (k * self._key_weights(q, k, mask)).to(k.dtype)
        return self.operate(q, k, tensors[2], feature_map="identity", normalize=True, eps=EPS, key_padding_mask=mask)

    def _key_weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Compute alpha [B, N, Hk, 1] of features q [B, N, H, D] and k [B, N, Hk, D] in at least float32.

        The mean of alpha over the real tokens is one.
        """
        mean_query = mean_value(q, mask, self.group).unflatten(2, (k.shape[2], -1)).mean(3)  # [B, 1, Hk, D]
        scores = self.scale * (k * mean_query).sum(-1, keepdim=True, dtype=mean_query.dtype)
        alpha, count = token_softmax(scores, mask, self.group)
        return count * alpha
