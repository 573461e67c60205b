"""Third-order linear attention."""

import hla_kernels
from zoo.mixers.base import LinearMixer


class HLA3(LinearMixer):
    """Third-order linear attention, A A' A V = q (K'K)(Q'Q)(K'V) with A = phi(q) phi(k)'.

    HLA, arXiv 2510.27258, section 7 (masked form corrected).
    8 N D^2 + 4 D^3 operations a head, two-sided. Options: `zoo.mixers.options.MixerOptions`.
    """

    name = "hla3"
    operator = staticmethod(hla_kernels.hla3)
    operator_packed = staticmethod(hla_kernels.hla3_qkvpacked)
