"""Rank-augmented linear attention: keys are weighted by what all queries together look for."""

import torch
from torch import Tensor

from hla_kernels.features import feature
from zoo.mixers.base import EPS
from zoo.mixers.context import Context
from zoo.mixers.hla import LinearAttention
from zoo.mixers.layers import mean_value
from zoo.mixers.options import TwoSidedRatioOptions

NO_CHANGE = "relu"  # a map that leaves non-negative features as they are, and lets the operator divide by their sum


class Rala(LinearAttention):
    """First-order linear attention with the keys alpha_j phi(k_j), alpha = N softmax_j(scale mean(phi q).phi(k_j)).

    RALA, arXiv 2411.07635, Eq. 6 to 9: the weights alpha raise the rank of K'V, and the output is multiplied by a
    function of the hidden states, which raises that of the result. Here this is the option `gate`, on by default and
    one at initialisation (published: a linear map). Heads that share keys share their alpha.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; 4 N D^2 operations per head. Options:
    `zoo.mixers.options.TwoSidedRatioOptions`. Raises ValueError for a map that may be negative.
    """

    name = "rala"
    sums_tokens = False
    defaults = TwoSidedRatioOptions(gate=True)
    options: TwoSidedRatioOptions

    def _reads_packed(self, ctx: Context) -> bool:
        return False

    def _mix(self, mask: Tensor | None, *tensors: Tensor) -> Tensor:
        if len(tensors) == 5:
            q, k, turned_q, turned_k, v = tensors
            weight = self._key_weights(q, k, mask)
            weighted = ((t * weight).to(t.dtype) for t in (k, turned_k))
            return super()._mix(mask, q, next(weighted), turned_q, next(weighted), v)
        q, k = (feature(t, self._inner_map) for t in tensors[:2])
        k = (k * self._key_weights(q, k, mask)).to(k.dtype)
        return self.operate(q, k, tensors[2], feature_map=NO_CHANGE, normalize=True, eps=EPS, key_padding_mask=mask)

    def _key_weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """alpha [B, N, Hk, 1] of the features q [B, N, H, D] and k [B, N, Hk, D], in float32 at least; real tokens have
        the mean one."""
        seeking = mean_value(q, mask).unflatten(2, (k.shape[2], -1)).mean(3)  # [B, 1, Hk, D]
        scores = self.scale * (k * seeking).sum(-1, keepdim=True, dtype=seeking.dtype)
        if mask is None:
            return k.shape[1] * scores.softmax(1)
        live = mask[:, :, None, None]
        count = live.sum(1, keepdim=True)
        alpha = scores.masked_fill(~live, torch.finfo(scores.dtype).min).softmax(1)
        return count * alpha
