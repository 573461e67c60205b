"""Resolvent mixer: geometric series over all orders of linear attention, summed by one linear solve."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.mixers.base import EPS
from zoo.mixers.context import LayerSpec
from zoo.mixers.moments import MomentMixer, apply_matrix, product, real_features
from zoo.mixers.options import TwoSidedRatioOptions, is_number

LARGEST_SHARE = 1 - 2**-10  # upper bound of the learned c: the matrix is singular at c = 1


@dataclass(frozen=True)
class ResolventOptions(TwoSidedRatioOptions):
    """Options of `resolvent`. Raises ValueError for a value that is not allowed.

    share: initial c in (0, 1), the ratio of the weights of successive orders
    """

    share: float = 0.5

    def __post_init__(self) -> None:
        if not is_number(self.share) or not 0 < self.share < 1:
            raise ValueError(f"share must be a number between 0 and 1, got {self.share!r}")
        super().__post_init__()


class Resolvent(MomentMixer):
    """Resolvent (1 - c) sum_p c^(p - 1) A^p V = (1 - c) q (I - c K'q)^-1 K'V of the normalised `la` weights A.

    c in (0, 1) is learned per head; c = 0 is `la`. q are the query features divided by the sum of their weights, so
    that the eigenvalues of A are at most one and the series converges. The rows of the result sum to one. One linear
    system [D, D] per head, in float32.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; 3 N D^2 + D^3 multiplications per head.
    Options: `ResolventOptions`. Raises ValueError for a feature map that may be negative and for a rotary embedding,
    which makes weights negative.
    """

    name = "resolvent"
    defaults = ResolventOptions()
    takes_rotations = False
    options: ResolventOptions

    def __init__(self, layer: LayerSpec, options: ResolventOptions) -> None:
        super().__init__(layer, options)
        self.share_logit = nn.Parameter(torch.empty(layer.num_heads, **layer.placement))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        c = torch.tensor(self.options.share, dtype=torch.float64)
        nn.init.constant_(self.share_logit, float(c.logit()))

    def _mix(self, mask: Tensor | None, *tensors: Tensor) -> Tensor:
        q, k, v, count = real_features(self._inner_map, mask, *self.split_qkv(*tensors))
        count = self.total_count(count, k)
        sums = self.total(k.sum(1, keepdim=True, dtype=torch.promote_types(k.dtype, torch.float32))) / count
        sums = sums.repeat_interleave(q.shape[2] // k.shape[2], dim=2)  # [B, 1, H, D]
        q = q / ((q * sums).sum(-1, keepdim=True) + EPS)  # in float32: rounded weights could sum to more than 1 / c
        c = self.share_logit.to(sums.dtype).sigmoid().clamp(max=LARGEST_SHARE)[:, None, None]
        steps = self.total(product(k, q)) / count  # [B, H, D, D]
        pairs = (self.total(product(k, v)) / count).repeat_interleave(q.shape[2] // v.shape[2], dim=1)
        eye = torch.eye(steps.shape[-1], device=steps.device, dtype=steps.dtype)
        return apply_matrix(q.to(v.dtype), torch.linalg.solve_ex(eye - c * steps, (1 - c) * pairs)[0])
