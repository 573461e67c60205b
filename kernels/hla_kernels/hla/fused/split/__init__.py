"""Passes over tokens with several programs per head: reduce, combine, middle, apply.

Forward and backward.

`state` holds, per (batch, head) and in float32, the moments P [F, V], S, C [F, V], R, W [F, F] an operator needs and
the vectors sum q, sum k [F], sum v [V], m1 [F], anchor [V], at the offsets of `spec.Layout`.
Every program writes separate partial sums, which `combine` adds in a fixed order: no atomics, deterministic.
"""

from .grads import apply_grads
from .moments import reduce_moments
from .readout import apply, reduce_readout

__all__ = ["apply", "apply_grads", "reduce_moments", "reduce_readout"]
