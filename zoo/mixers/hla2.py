"""Second-order linear attention."""

import hla_kernels
from zoo.mixers.base import LinearMixer


class HLA2(LinearMixer):
    """Second-order linear attention, A A' V = q (K'K)(Q'V) with A = phi(q) phi(k)'.

    HLA, arXiv 2510.27258, sections 3-4 (Eq. 4.1).
    6 N D^2 + 2 D^3 operations a head, two-sided. Options: `zoo.mixers.options.MixerOptions`.
    """

    name = "hla2"
    operator = staticmethod(hla_kernels.hla2)
    operator_packed = staticmethod(hla_kernels.hla2_qkvpacked)
