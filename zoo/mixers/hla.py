"""Linear attention of first order and of higher orders: second, asymmetric second, third."""

from typing import ClassVar

import torch
from torch import Tensor

import hla_kernels
from zoo.mixers.base import LinearMixer
from zoo.mixers.context import LayerSpec
from zoo.mixers.options import MixerOptions


class LinearAttention(LinearMixer):
    """First-order linear attention, A V = q (K'V) with A = phi(q) phi(k)'.

    Katharopoulos et al., arXiv 2006.16236, Eq. 4.
    4 N D^2 operations per head, two-sided. Options: `zoo.mixers.options.MixerOptions`.
    """

    name = "la"
    sums_tokens = True
    operator = staticmethod(hla_kernels.linear_attention)
    operator_packed = staticmethod(hla_kernels.linear_attention_qkvpacked)


class HigherOrder(LinearMixer):
    """A mixer W V of a higher order in A = phi(q) phi(k)', which can begin training as first-order attention.

    `blend` [4], coefficients of (A, A A', A A, A A' A), is there while `anneal` mixes A in; no part of a saved model.
    """

    sums_tokens = True
    term: ClassVar[int]  # place of W among the coefficients
    blend: Tensor | None

    def __init__(self, layer: LayerSpec, options: MixerOptions) -> None:
        super().__init__(layer, options)
        self.register_buffer("blend", None, persistent=False)

    def set_warmup(self, part: float, ridge: float, device: torch.device) -> None:
        """Weigh tokens by (1 - part) ridge A + part W: first order at part 0, the mixer itself from 1 on.

        For `ahla` this is its ridge, lambda = ridge (1 - part) / part, to the factor `part`, which a ratio or a norm
        after it takes away. Raises ValueError for a mixer with causality or a ridge of its own.
        """
        opt = self.options
        if opt.causal or opt.ridge:
            raise ValueError(
                f"the mixer {self.name!r} is annealed two-sided and to no ridge of its own: build it with causal=False "
                f"and ridge=0, got causal={opt.causal}, ridge={opt.ridge}"
            )
        if part >= 1:
            self.blend = None
            return
        if self.blend is None:
            self.blend = torch.zeros(4, device=device)
        self.blend[0], self.blend[self.term] = (1 - part) * ridge, part

    def operate(self, *tokens: Tensor, **options) -> Tensor:
        if self.blend is None:
            return super().operate(*tokens, **options)
        coefficients = self.blend.repeat(self.num_heads, 1)
        if len(tokens) == 1:
            return hla_kernels.polynomial_qkvpacked(tokens[0], coefficients, **options)
        q, k, v = tokens
        return hla_kernels.polynomial(q, k, v, coefficients, **options)


class AHLA(HigherOrder):
    """Asymmetric second-order linear attention, A A V = q (K'Q)(K'V) with A = phi(q) phi(k)'.

    HLA, arXiv 2510.27258, section 6 (Eq. 6.2).
    6 N D^2 + 2 D^3 operations per head, two-sided. Options: `zoo.mixers.options.MixerOptions`.
    """

    name = "ahla"
    term = 2
    operator = staticmethod(hla_kernels.ahla)
    operator_packed = staticmethod(hla_kernels.ahla_qkvpacked)


class HLA2(HigherOrder):
    """Second-order linear attention, A A' V = q (K'K)(Q'V) with A = phi(q) phi(k)'.

    HLA, arXiv 2510.27258, sections 3-4 (Eq. 4.1).
    6 N D^2 + 2 D^3 operations per head, two-sided. Options: `zoo.mixers.options.MixerOptions`.
    """

    name = "hla2"
    term = 1
    operator = staticmethod(hla_kernels.hla2)
    operator_packed = staticmethod(hla_kernels.hla2_qkvpacked)


class HLA3(HigherOrder):
    """Third-order linear attention, A A' A V = q (K'K)(Q'Q)(K'V) with A = phi(q) phi(k)'.

    HLA, arXiv 2510.27258, section 7 (masked form corrected).
    8 N D^2 + 4 D^3 operations per head, two-sided. Options: `zoo.mixers.options.MixerOptions`; the exponent is 4 at
    first, since three products even the weights out more than one.
    """

    name = "hla3"
    defaults = MixerOptions(exponent=4.0)
    term = 3
    operator = staticmethod(hla_kernels.hla3)
    operator_packed = staticmethod(hla_kernels.hla3_qkvpacked)
