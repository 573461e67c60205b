"""Asymmetric second-order linear attention."""

import hla_kernels
from zoo.mixers.base import LinearMixer


class AHLA(LinearMixer):
    """Asymmetric second-order linear attention, A A V = q (K'Q)(K'V) with A = phi(q) phi(k)'.

    HLA, arXiv 2510.27258, section 6 (Eq. 6.2).
    6 N D^2 + 2 D^3 operations a head, two-sided. Options: `zoo.mixers.options.MixerOptions`.
    """

    name = "ahla"
    operator = staticmethod(hla_kernels.ahla)
    operator_packed = staticmethod(hla_kernels.ahla_qkvpacked)
