"""InLine attention: first-order linear attention whose weights sum to one by subtraction instead of division."""

from zoo.mixers.hla import LinearAttention
from zoo.mixers.options import MixerOptions


class InLine(LinearAttention):
    """o_t = mean(v) + scale q_t . mean_j (k_j - mean k) v_j': the weights (s_tj - mean_j s_tj + 1) / N of N tokens.

    A preset of `la`: identity map, centred keys, mean-value path. InLine attention, arXiv 2412.06590, Eq. 5, with the
    factor D^-0.5 / N of its published code and without its predicted convolution (`lepe` is the nearest option). It is
    the first-order Taylor expansion of softmax attention in the scores s.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; 4 N D^2 operations per head. Options:
    `zoo.mixers.options.MixerOptions`.
    """

    name = "inline"
    defaults = MixerOptions(feature_map="identity", normalize=False, center="k", mean_path=True)
