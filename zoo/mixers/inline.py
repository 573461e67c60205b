"""InLine attention: linear attention whose weights are normalised by subtraction, not division."""

from zoo.mixers.hla import LinearAttention
from zoo.mixers.options import MixerOptions


class InLine(LinearAttention):
    """InLine attention o_t = mean(v) + scale q_t . mean_j (k_j - mean k) v_j', weights (s_tj - mean_j s_tj + 1) / N.

    arXiv 2412.06590, Eq. 5, with the factor D^-0.5 / N of its published code and without its predicted convolution
    (`lepe` is the nearest option). Equals `la` with identity map, centred keys and mean path: the first-order Taylor
    expansion of softmax attention in the scores s.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; 2 N D^2 multiplications per head. Options:
    `zoo.mixers.options.MixerOptions`.
    """

    name = "inline"
    defaults = MixerOptions(feature_map="identity", normalize=False, center="k", mean_path=True)
