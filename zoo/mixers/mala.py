"""Magnitude-aware linear attention (MALA): weights depend on the norm of the query."""

from torch import Tensor

from zoo.mixers.hla import LinearAttention
from zoo.mixers.options import TwoSidedRatioOptions


class Mala(LinearAttention):
    """MALA o_t = mean_j w_tj v_j, w_tj = a_tj / s_t + a_tj - s_t, a_tj = scale phi(q_t).phi(k_j), s_t = mean_j a_tj.

    arXiv 2507.00698, Eq. 13, with the scale of its published code. The first term does not depend on the norm of the
    query; the second, linear attention with centred keys, grows with it. The weights of a query have mean one and may
    be negative. With a rotary embedding, the first term is `la` and the second uses the rotated features.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; two calls of `la`, 4 N D^2 multiplications per head.
    Options: `zoo.mixers.options.TwoSidedRatioOptions`. Raises ValueError for a map that may be negative.
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
