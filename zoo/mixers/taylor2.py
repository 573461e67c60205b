"""Second-order Taylor expansion of softmax attention, linear in the number of tokens."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hla_kernels
from zoo.mixers.base import LinearMixer
from zoo.mixers.context import Context, LayerSpec
from zoo.mixers.options import MixerOptions, is_number
from zoo.mixers.poly import MIN_COEFFICIENT


@dataclass(frozen=True)
class TaylorOptions(MixerOptions):
    """Options of `taylor2`. Raises ValueError for feature_map, center, causal and values that are not allowed.

    coefficients: initial coefficients c1, c2 of the two terms of the expansion
    width: channels per head of the degree-2 term, after learned projections of q and k; none for all channels without
      a projection
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
                "taylor2 expands softmax around uniform weights: feature_map='identity', center='k' and mean_path=True "
                f"are fixed, got {self.feature_map!r}, {self.center!r} and {self.mean_path}"
            )


class Taylor2(LinearMixer):
    """Taylor mixer mean(v) + (c1 mean_j s_tj u_j + c2 mean_j s_tj^2 / 2 u_j) / (1 + c2 mean_j s_tj^2 / 2).

    s_tj = scale q_t.(k_j - mean k), u_j = v_j - mean v, learned c [H, 2]. With c = (1, 1) these are the weights
    1 + s + s^2 / 2, softmax to second order around uniform weights. Without `normalize` the denominator is omitted;
    with `normalize` c2 is kept positive (softplus). If `width` < D, the degree-2 term reads q and k through learned
    projections [D, width], initialised to the first channels; `zoo.conversion.calibrate` computes the best ones for
    the data. Two-sided only.

    N D^2 (D + 1) multiplications per head, or 2 N^2 D for few tokens, where the N x N weights are cheaper. State and
    multiplications per token and head, for D = Dv = 64: 2080 x 64 and 274,000; width 16: 136 x 64 and 26,000;
    `la`: 64 x 64 and 8,200. Options: `TaylorOptions`. Operator: hla_kernels.softmax.taylor, after arXiv 2402.18668.
    """

    name = "taylor2"
    shares_tokens = True
    operator = staticmethod(hla_kernels.taylor2)
    operator_packed = staticmethod(hla_kernels.taylor2_qkvpacked)
    defaults = TaylorOptions(feature_map="identity", normalize=True, center="k", mean_path=True)
    options: TaylorOptions

    def __init__(self, layer: LayerSpec, options: TaylorOptions) -> None:
        super().__init__(layer, options)
        heads, d, r, dd = layer.num_heads, layer.head_dim, options.width, layer.placement
        if r is not None and r > d:
            raise ValueError(f"width must be at most {d}, the channels per head, got {r}")
        self.coefficients = nn.Parameter(torch.empty(heads, 2, **dd))
        if r is not None:
            self.narrow_q = nn.Parameter(torch.empty(heads, d, r, **dd))
            self.narrow_k = nn.Parameter(torch.empty(layer.kv_heads, d, r, **dd))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        c = torch.tensor(self.options.coefficients, device=self.coefficients.device, dtype=torch.float64)
        self.set_coefficients(c.expand_as(self.coefficients))
        if self.options.width is not None:
            for p in (self.narrow_q, self.narrow_k):
                p.copy_(torch.eye(*p.shape[1:], device=p.device).expand_as(p))

    @torch.no_grad()
    def set_coefficients(self, c: Tensor) -> None:
        """Set c1, c2 [H, 2], with `normalize` c2 to at least `MIN_COEFFICIENT`."""
        second = c[:, 1]
        if self.options.normalize:
            second = second.clamp(min=MIN_COEFFICIENT).expm1().log()  # the inverse of softplus
        self.coefficients.copy_(torch.stack([c[:, 0], second], 1))

    def _reads_packed(self, ctx: Context) -> bool:
        return super()._reads_packed(ctx) and self.options.width is None

    def _mix(self, mask: Tensor | None, *tensors: Tensor) -> Tensor:
        """Mix (qkv), (q, k, v), or with a rotary embedding (q, k, rotated q, rotated k, v): the last three are used."""
        tokens, more = tensors[-3:], {}
        if self.options.width is not None:
            pairs = zip(tokens, (self.narrow_q, self.narrow_k), strict=False)
            more["narrow"] = [torch.einsum("bnhd,hdr->bnhr", t, p.to(t.dtype)) for t, p in pairs]
        options = {"normalize": self.options.normalize, "q_scale": self.scale, "key_padding_mask": mask, **more}
        return self.operate(*tokens, coefficients=self._operator_coefficients(), **options)

    def _operator_coefficients(self) -> Tensor:
        """Return the coefficients c1, c2 [H, 2] of the operator."""
        if not self.options.normalize:
            return self.coefficients
        first, second = self.coefficients.unbind(1)
        return torch.stack([first, F.softplus(second)], 1)
