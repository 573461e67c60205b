"""Passes over tokens with several programs per head: reduce, combine, middle, apply.

Forward and backward.

`state` holds, per (batch, head) and in float32, the moments P [F, V], S, C [F, V], R, W [F, F] an operator needs and
the vectors sum q, sum k [F], sum v [V], m1 [F], anchor [V], at the offsets of `spec.Layout`.
Every program writes separate partial sums, which `hla_combine` adds in a fixed order: no atomics, deterministic.
"""

from .grads import hla_apply_grads
from .moments import hla_reduce_moments
from .readout import hla_apply, hla_reduce_readout

__all__ = ["hla_apply", "hla_apply_grads", "hla_reduce_moments", "hla_reduce_readout"]
