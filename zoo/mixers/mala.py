"""Magnitude-aware linear attention: first order, with weights that depend on the length of the query."""

from torch import Tensor

from zoo.mixers.hla import LinearAttention
from zoo.mixers.options import TwoSidedRatioOptions


class Mala(LinearAttention):
    """o_t = mean_j w_tj v_j with w_tj = a_tj / s_t + a_tj - s_t, a_tj = scale phi(q_t).phi(k_j), s_t = mean_j a_tj.

    MALA, arXiv 2507.00698, Eq. 13 with the scale of its published code. The ratio a / s alone forgets how long a query
    is; the second part, linear attention with centred keys, grows with it. The weights of a query have the mean one
    and may be negative. Under a rotary host the ratio is the one of `la` and the second part is that of the rotated
    features.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; two calls of `la`, 8 N D^2 operations per head. Options:
    `zoo.mixers.options.TwoSidedRatioOptions`. Raises ValueError for a map that may be negative.
    """

    name = "mala"
    defaults = TwoSidedRatioOptions()
    options: TwoSidedRatioOptions

    def _mix(self, mask: Tensor | None, *tensors: Tensor) -> Tensor:
        centred = {"center": "k", "q_scale": self.scale, "key_padding_mask": mask}
        if len(tensors) == 5:
            second = self.operate(*tensors[2:], **centred)
        else:
            second = self.operate(*tensors, feature_map=self._inner_map, **centred)
        return super()._mix(mask, *tensors) + second
