"""Mixers: modules `mixer(q, k, v, ctx) -> o` that replace softmax attention.

q, k, v, o are [B, N, H, D], `ctx` is a `Context`; `Mixer` is the base class. The host model keeps its projections,
norms and output projection; a mixer adds only its own parameters. A new mixer is one file here, with its options, and
one row in `MIXERS`: names, `--help`, error messages and tests are generated from it (docs/howto/new_mixer.md).
"""

from typing import Any

from zoo.mixers.base import LinearMixer
from zoo.mixers.context import Context, LayerSpec
from zoo.mixers.delta import GLA, HDLA, DeltaNet, GatedDeltaNet, Mamba2, RetNet
from zoo.mixers.hla import AHLA, HLA2, HLA3, LinearAttention
from zoo.mixers.inline import InLine
from zoo.mixers.low_rank import Efficient, Flare, Linformer, Nystrom, Performer, Rfa
from zoo.mixers.mala import Mala
from zoo.mixers.mega import Mega
from zoo.mixers.mesa import Mesa
from zoo.mixers.mhla import BlockMixer, SecondOrderBlockMixer
from zoo.mixers.multipole import Multipole
from zoo.mixers.options import MixerConfig, MixerOptions
from zoo.mixers.poly import Polynomial
from zoo.mixers.protocol import Mixer
from zoo.mixers.rala import Rala
from zoo.mixers.resolvent import Resolvent
from zoo.mixers.simplex2 import Simplex2
from zoo.mixers.softmax import Softmax
from zoo.mixers.strassen import Multilinear, Strassen
from zoo.mixers.taylor2 import Taylor2
from zoo.mixers.triple import Triple

MIXERS: dict[str, type[Mixer]] = {
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
    "strassen": Strassen,
    "multilinear": Multilinear,
    "triple": Triple,
    "simplex2": Simplex2,
    "efficient": Efficient,
    "performer": Performer,
    "rfa": Rfa,
    "flare": Flare,
    "linformer": Linformer,
    "nystrom": Nystrom,
    "mega": Mega,
    "hdla": HDLA,
    "gdn": GatedDeltaNet,
    "deltanet": DeltaNet,
    "gla": GLA,
    "mamba2": Mamba2,
    "retnet": RetNet,
    "taylor2": Taylor2,
    "multipole": Multipole,
}


def build_mixer(name: str, dim: int, num_heads: int, head_dim: int, **given: Any) -> Mixer:
    """Build the mixer `name` for hidden width `dim` and `num_heads` heads of `head_dim` channels.

    given: options of the mixer and further fields of `LayerSpec` (num_kv_heads, scale, grid, prefix, device, dtype).
    Raises ValueError for an unknown name or option, with the nearest valid one.
    """
    layer = {key: given.pop(key) for key in LayerSpec._fields if key in given}
    return MixerConfig.parse(name, given).build(LayerSpec(dim, num_heads, head_dim, **layer))


__all__ = ["MIXERS", "Context", "LayerSpec", "LinearMixer", "Mixer", "MixerConfig", "MixerOptions", "build_mixer"]
