"""Linear attention of first order and of higher orders: second, asymmetric second, third."""

import hla_kernels
from zoo.mixers.base import LinearMixer


class LinearAttention(LinearMixer):
    """First-order linear attention, A V = q (K'V) with A = phi(q) phi(k)'.

    Katharopoulos et al., arXiv 2006.16236, Eq. 4.
    4 N D^2 operations a head, two-sided. Options: `zoo.mixers.options.MixerOptions`.
    """

    name = "la"
    operator = staticmethod(hla_kernels.linear_attention)
    operator_packed = staticmethod(hla_kernels.linear_attention_qkvpacked)


class AHLA(LinearMixer):
    """Asymmetric second-order linear attention, A A V = q (K'Q)(K'V) with A = phi(q) phi(k)'.

    HLA, arXiv 2510.27258, section 6 (Eq. 6.2).
    6 N D^2 + 2 D^3 operations a head, two-sided. Options: `zoo.mixers.options.MixerOptions`.
    """

    name = "ahla"
    operator = staticmethod(hla_kernels.ahla)
    operator_packed = staticmethod(hla_kernels.ahla_qkvpacked)


class HLA2(LinearMixer):
    """Second-order linear attention, A A' V = q (K'K)(Q'V) with A = phi(q) phi(k)'.

    HLA, arXiv 2510.27258, sections 3-4 (Eq. 4.1).
    6 N D^2 + 2 D^3 operations a head, two-sided. Options: `zoo.mixers.options.MixerOptions`.
    """

    name = "hla2"
    operator = staticmethod(hla_kernels.hla2)
    operator_packed = staticmethod(hla_kernels.hla2_qkvpacked)


class HLA3(LinearMixer):
    """Third-order linear attention, A A' A V = q (K'K)(Q'Q)(K'V) with A = phi(q) phi(k)'.

    HLA, arXiv 2510.27258, section 7 (masked form corrected).
    8 N D^2 + 4 D^3 operations a head, two-sided. Options: `zoo.mixers.options.MixerOptions`.
    """

    name = "hla3"
    operator = staticmethod(hla_kernels.hla3)
    operator_packed = staticmethod(hla_kernels.hla3_qkvpacked)
