"""First-order linear attention."""

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
