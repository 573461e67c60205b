"""Mixers: modules `mixer(q, k, v, ctx) -> o` that stand where a backbone had softmax attention.

q, k, v, o are [B, N, H, D], `ctx` a `Context`. The host keeps its projections, norms and output projection; a mixer
adds only its own parameters. A new mixer is one file here and one row in `MIXERS`.
"""

from torch import nn

from zoo.errors import unknown_name
from zoo.mixers.base import LinearMixer
from zoo.mixers.context import Context
from zoo.mixers.hla import AHLA, HLA2, HLA3, LinearAttention
from zoo.mixers.inline import InLine
from zoo.mixers.mala import Mala
from zoo.mixers.mesa import Mesa
from zoo.mixers.mhla import BlockMixer, SecondOrderBlockMixer
from zoo.mixers.multipole import Multipole
from zoo.mixers.options import MixerOptions
from zoo.mixers.poly import Polynomial
from zoo.mixers.rala import Rala
from zoo.mixers.resolvent import Resolvent
from zoo.mixers.softmax import Softmax
from zoo.mixers.taylor2 import Taylor2

MIXERS: dict[str, type[nn.Module]] = {
    "softmax": Softmax,
    "la": LinearAttention,
    "hla2": HLA2,
    "ahla": AHLA,
    "hla3": HLA3,
    "poly": Polynomial,
    "mhla": BlockMixer,
    "mhla2": SecondOrderBlockMixer,
    "mala": Mala,
    "rala": Rala,
    "inline": InLine,
    "mesa": Mesa,
    "resolvent": Resolvent,
    "taylor2": Taylor2,
    "multipole": Multipole,
}


def build_mixer(name: str, dim: int, num_heads: int, head_dim: int, **options) -> nn.Module:
    """The mixer called `name` for hidden width `dim` and `num_heads` heads of `head_dim` channels.

    `options` are those of the mixer (`MixerOptions`), and `scale`, `device`, `dtype`; `grid` and `prefix` of the host
    for a mixer with `needs_layout`. Raises ValueError for an unknown
    name or option, with the nearest valid one.
    """
    if name not in MIXERS:
        raise unknown_name("mixer", name, MIXERS)
    return MIXERS[name](dim, num_heads, head_dim, **options)


__all__ = ["MIXERS", "Context", "LinearMixer", "MixerOptions", "build_mixer"]
