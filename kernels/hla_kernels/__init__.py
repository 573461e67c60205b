"""Higher-order linear attention as functions of tensors.

    import hla_kernels as hk
    o = hk.ahla(q, k, v, feature_map="elu1", normalize=True)     q [B, N, H, D], k, v [B, N, Hk, .] -> [B, N, H, Dv]

Operators: `api` (signature, options), `api.blocks` (blocks of a grid), `api.softmax` (Taylor expansion of softmax,
expansion around block means with an exact near field, exact key tiles chosen by error), `api.delta` (delta rules).
Symbols and equations: `hla`, `blockmix`, `softmax.taylor`, `softmax.multipole`, `delta_rule`. Depends on torch only.
"""

from . import flops as _flops  # noqa: F401  registers the formulas
from .api import (
    ahla,
    ahla_qkvpacked,
    hla2,
    hla2_qkvpacked,
    hla3,
    hla3_qkvpacked,
    linear_attention,
    linear_attention_qkvpacked,
    polynomial,
    polynomial_qkvpacked,
    softmax_attention,
    softmax_attention_qkvpacked,
)
from .api.blocks import mhla, mhla_qkvpacked
from .api.delta import delta
from .api.softmax import adaptive_multipole, multipole, taylor2, taylor2_qkvpacked
from .blockmix.streaming import BlockState
from .delta_rule import rules as delta_rules
from .delta_rule.call import DeltaState, merge_delta
from .features import FEATURE_MAPS
from .hla.fused.plan import set_batch_invariant
from .hla.streaming.merge import merge
from .hla.streaming.state import State
from .hla.streaming.stream import read
from .op import Explanation, explain
from .options import MAX_HEAD_DIM, OPS
from .ranks.sharded import sharded

__all__ = [
    "FEATURE_MAPS",
    "MAX_HEAD_DIM",
    "OPS",
    "BlockState",
    "DeltaState",
    "Explanation",
    "State",
    "adaptive_multipole",
    "ahla",
    "ahla_qkvpacked",
    "delta",
    "delta_rules",
    "explain",
    "hla2",
    "hla2_qkvpacked",
    "hla3",
    "hla3_qkvpacked",
    "linear_attention",
    "linear_attention_qkvpacked",
    "merge",
    "merge_delta",
    "mhla",
    "mhla_qkvpacked",
    "multipole",
    "polynomial",
    "polynomial_qkvpacked",
    "read",
    "set_batch_invariant",
    "sharded",
    "softmax_attention",
    "softmax_attention_qkvpacked",
    "taylor2",
    "taylor2_qkvpacked",
]
