"""Softmax attention to second order, linear in the number of tokens."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hla_kernels
from zoo.mixers.base import LinearMixer
from zoo.mixers.context import LayerSpec
from zoo.mixers.options import MixerOptions, is_number

MIN_COEFFICIENT = 1e-3  # of a positive coefficient: softplus never reaches zero


@dataclass(frozen=True)
class TaylorOptions(MixerOptions):
    """Options of `taylor2`: without another feature map, centring or causality. Raises ValueError for these and for a
    value that is not allowed.

    coefficients: initial c1, c2 of the two terms of the expansion
    width: channels per head that the degree-2 term reads, through one learned projection of q and one of k; none for
      all channels without a projection
    """

    two_sided = True

    coefficients: tuple[float, ...] = (1.0, 1.0)
    width: int | None = None

    def __post_init__(self) -> None:
        c = self.coefficients
        if not isinstance(c, tuple) or len(c) != 2 or not all(map(is_number, c)):
            raise ValueError(f"coefficients are the two numbers c1, c2, got {c!r}")
        if self.width is not None and (not isinstance(self.width, int) or self.width < 1):
            raise ValueError(f"width must be a positive number of channels or None, got {self.width!r}")
        super().__post_init__()

    def _check_normalize(self) -> None:
        if self.feature_map != "identity" or self.center != "k" or self.mean_path is not True:
            raise ValueError(
                "taylor2 expands softmax around its mean value: feature_map='identity', center='k' and mean_path=True "
                f"are fixed, got {self.feature_map!r}, {self.center!r} and {self.mean_path}"
            )


class Taylor2(LinearMixer):
    """mean(v) + (c1 mean_j s_tj (v_j - mean v) + c2 mean_j s_tj^2 / 2 (v_j - mean v)) / (1 + c2 mean_j s_tj^2 / 2).

    s_tj = scale q_t.(k_j - mean k), learned c [H, 2]: with c = (1, 1) the average with the weights 1 + s + s^2 / 2,
    softmax to second order around uniform weights (without `normalize` the divisor is left out). With `normalize` c2
    is kept positive (softplus). `width` < D: the degree-2 term reads q and k through learned projections [D, width],
    at first the first channels; `zoo.conversion.calibrate` sets the best ones for the data. Two-sided only.

    State and cost a head, D = Dv = 64: 2080 x 64 numbers and 274,000 multiplications a token; width 16: 136 x 64 and
    26,000; `la` has 64 x 64 and 8,200. For few tokens N the N x N weights are cheaper and are taken: 128 N.
    Options: `TaylorOptions`. The expansion: hla_kernels.softmax.taylor, after arXiv 2402.18668.
    """

    name = "taylor2"
    operator = staticmethod(hla_kernels.taylor2)
    operator_packed = staticmethod(hla_kernels.taylor2_qkvpacked)
    defaults = TaylorOptions(feature_map="identity", normalize=True, center="k", mean_path=True)
    options: TaylorOptions

    def __init__(self, layer: LayerSpec, options: TaylorOptions) -> None:
        super().__init__(layer, options)
        heads, d, r, dd = layer.num_heads, layer.head_dim, options.width, layer.placement
        if r is not None and r > d:
            raise ValueError(f"width must be at most the {d} channels of a head, got {r}")
        self.coefficients = nn.Parameter(torch.empty(heads, 2, **dd))
        if r is not None:
            self.narrow_q = nn.Parameter(torch.empty(heads, d, r, **dd))
            self.narrow_k = nn.Parameter(torch.empty(layer.kv_heads, d, r, **dd))
        self._fill()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "coefficients"):
            self._fill()

    @torch.no_grad()
    def _fill(self) -> None:
        c = torch.tensor(self.options.coefficients, device=self.coefficients.device, dtype=torch.float64)
        self.set_coefficients(c.expand_as(self.coefficients))
        if self.options.width is not None:
            for p in (self.narrow_q, self.narrow_k):
                p.copy_(torch.eye(*p.shape[1:], device=p.device).expand_as(p))

    @torch.no_grad()
    def set_coefficients(self, c: Tensor) -> None:
        """Take c1, c2 [H, 2]; with `normalize` at least `MIN_COEFFICIENT` for c2."""
        second = c[:, 1]
        if self.options.normalize:
            second = second.clamp(min=MIN_COEFFICIENT).expm1().log()  # the inverse of softplus
        self.coefficients.copy_(torch.stack([c[:, 0], second], 1))

    def _reads_packed(self, ctx: Any) -> bool:
        return super()._reads_packed(ctx) and self.options.width is None

    def _mix(self, mask: Tensor | None, *tensors: Tensor) -> Tensor:
        """(qkv), (q, k, v), or with a rotary host (q, k, rotated q, rotated k, v): the expansion is of the rotated
        scores."""
        options: dict[str, Any] = {"normalize": self.options.normalize, "q_scale": self.scale, "key_padding_mask": mask}
        if len(tensors) == 1:
            return self.operator_packed(*tensors, self._operator_coefficients(), **options)
        q, k, v = tensors[-3:]
        if self.options.width is not None:
            parts = ((q, self.narrow_q), (k, self.narrow_k))
            q2, k2 = (torch.einsum("bnhd,hdr->bnhr", t, p.to(t.dtype)) for t, p in parts)
            options["narrow"] = (q2, k2)
        return self.operator(q, k, v, self._operator_coefficients(), **options)

    def _operator_coefficients(self) -> Tensor:
        """c1, c2 [H, 2] as the operator takes them."""
        if not self.options.normalize:
            return self.coefficients
        first, second = self.coefficients.unbind(1)
        return torch.stack([first, F.softplus(second)], 1)
