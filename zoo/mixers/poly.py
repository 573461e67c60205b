"""Learned polynomial of the four orders, per head."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hla_kernels
from zoo.mixers.base import LinearMixer
from zoo.mixers.context import LayerSpec
from zoo.mixers.options import MixerOptions, is_number

MIN_COEFFICIENT = 1e-3  # smallest initial value of a positive coefficient: softplus never reaches zero


@dataclass(frozen=True)
class PolynomialOptions(MixerOptions):
    """Options of `poly`. Raises ValueError for a value that is not allowed.

    coefficients: initial coefficients c1..c4 of the four orders
    """

    two_sided = True

    coefficients: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        c = self.coefficients
        if not isinstance(c, tuple) or len(c) != 4 or not all(map(is_number, c)):
            raise ValueError(f"coefficients are the four numbers c1..c4, got {c!r}")
        super().__post_init__()


class Polynomial(LinearMixer):
    """Polynomial mixer (c1 A + c2 A A' + c3 A A + c4 A A' A) V with learned c [H, 4], A = phi(q) phi(k)'.

    The default c = (1, 0, 0, 0) equals `la` at initialisation. With `normalize=True` the coefficients are kept positive
    (softplus), since a signed sum can cross zero. With feature_map="identity", normalize=False, center="k" and
    mean_path=True it starts as the first-order Taylor expansion mean(v) + q (K - mean(k))'V / N of softmax. Two-sided
    only. The orders share one D x D operator per head. Orders as in HLA, arXiv 2510.27258.

    6 N D^2 + 4 D^3 multiplications per head. Options: `PolynomialOptions`.
    """

    name = "poly"
    shares_tokens = True
    operator = staticmethod(hla_kernels.polynomial)
    operator_packed = staticmethod(hla_kernels.polynomial_qkvpacked)
    defaults = PolynomialOptions()
    options: PolynomialOptions

    def __init__(self, layer: LayerSpec, options: PolynomialOptions) -> None:
        super().__init__(layer, options)
        self.coefficients = nn.Parameter(torch.empty(layer.num_heads, 4, **layer.placement))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        c = torch.tensor(self.options.coefficients, device=self.coefficients.device, dtype=torch.float64)
        self.set_coefficients(c.expand_as(self.coefficients))

    @torch.no_grad()
    def set_coefficients(self, c: Tensor) -> None:
        """Set c1..c4 [H, 4], with `normalize` to at least `MIN_COEFFICIENT` each."""
        self.coefficients.copy_(c.clamp(min=MIN_COEFFICIENT).expm1().log() if self.options.normalize else c)

    def operate(self, *tokens: Tensor, **options) -> Tensor:
        c = F.softplus(self.coefficients) if self.options.normalize else self.coefficients
        return super().operate(*tokens, coefficients=c, **options)
