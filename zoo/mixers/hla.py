"""Linear attention of first, second, asymmetric second and third order."""

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
    2 N D^2 multiplications per head, two-sided. Options: `zoo.mixers.options.MixerOptions`.
    """

    name = "la"
    shares_tokens = True
    operator = staticmethod(hla_kernels.linear_attention)
    operator_packed = staticmethod(hla_kernels.linear_attention_qkvpacked)


class HigherOrder(LinearMixer):
    """Base class of higher-order mixers W V, W a product of A = phi(q) phi(k)' and A', with order warm-up.

    term: index of W among (A, A A', A A, A A' A).
    blend: coefficients [4] of these terms during warm-up, not saved with the model; None otherwise.
    """

    shares_tokens = True
    term: ClassVar[int]
    blend: Tensor | None

    def __init__(self, layer: LayerSpec, options: MixerOptions) -> None:
        super().__init__(layer, options)
        self.register_buffer("blend", None, persistent=False)

    def set_warmup(self, progress: float, scale: float, device: torch.device) -> None:
        """Blend with first-order attention: weights (1 - progress) scale A + progress W, and W from progress 1 on.

        Raises ValueError for a causal mixer or one with a ridge.
        """
        opt = self.options
        if opt.causal or opt.ridge:
            raise ValueError(
                f"order warm-up of {self.name!r} needs causal=False and ridge=0, got causal={opt.causal}, "
                f"ridge={opt.ridge}"
            )
        if progress >= 1:
            self.blend = None
            return
        if self.blend is None:
            self.blend = torch.zeros(4, device=device)
        self.blend[0], self.blend[self.term] = (1 - progress) * scale, progress

    def operate(self, *tokens: Tensor, **options) -> Tensor:
        if self.blend is None:
            return super().operate(*tokens, **options)
        coefficients = self.blend.repeat(self.num_heads, 1)
        if len(tokens) == 1 and self.group is None:
            return hla_kernels.polynomial_qkvpacked(tokens[0], coefficients, **options)
        return self.run(hla_kernels.polynomial, *self.split_qkv(*tokens), coefficients=coefficients, **options)


class AHLA(HigherOrder):
    """Asymmetric second-order linear attention, A A V = q (K'Q)(K'V) with A = phi(q) phi(k)'.

    HLA, arXiv 2510.27258, section 6 (Eq. 6.2).
    3 N D^2 + D^3 multiplications per head, two-sided. Options: `zoo.mixers.options.MixerOptions`.
    """

    name = "ahla"
    term = 2
    operator = staticmethod(hla_kernels.ahla)
    operator_packed = staticmethod(hla_kernels.ahla_qkvpacked)


class HLA2(HigherOrder):
    """Second-order linear attention, A A' V = q (K'K)(Q'V) with A = phi(q) phi(k)'.

    HLA, arXiv 2510.27258, sections 3-4 (Eq. 4.1).
    3 N D^2 + D^3 multiplications per head, two-sided. Options: `zoo.mixers.options.MixerOptions`.
    """

    name = "hla2"
    term = 1
    operator = staticmethod(hla_kernels.hla2)
    operator_packed = staticmethod(hla_kernels.hla2_qkvpacked)


class HLA3(HigherOrder):
    """Third-order linear attention, A A' A V = q (K'K)(Q'Q)(K'V) with A = phi(q) phi(k)'.

    HLA, arXiv 2510.27258, section 7 (masked form corrected).
    4 N D^2 + 2 D^3 multiplications per head, two-sided. Options: `zoo.mixers.options.MixerOptions`; the exponent
    starts at 4, since three products make weights more uniform than one.
    """

    name = "hla3"
    defaults = MixerOptions(exponent=4.0)
    term = 3
    operator = staticmethod(hla_kernels.hla3)
    operator_packed = staticmethod(hla_kernels.hla3_qkvpacked)
