"""Passes over the tokens of one head. Every kernel combines one or more of them with the D x D algebra of one head.

q, k, v, g, o point at the first token of the head; strides are in elements. phi(q), phi(k) have the width F = F1 + F2,
v and g the width V = V1 + V2.

    sum_moments   P = Sum k v'  S = Sum k k'  C = Sum q v'  R = Sum k q'  W = Sum q q', token sums, and dM' = Sum g q'
    sum_features  as sum_moments with phi(q) and phi(k); dm1 and dM' through the division of the normalised form;
                  feature_moments, moments_apart: the moments only, in one pass or two
    sum_keys      P and the token sums of phi(k) and v alone
    sum_gradient  dM' = Sum g q' alone
    sum_ratio     dm1 and dM' through the division, and dq of the first order
    sum_divided   the same sums of wide heads, from numbers that a pass before it wrote (`wide`)
    read_out      o = q M + row, or q M / (q.m1 + eps)
    write_grads   dq, dk, dv from the weights of `algebra.weights`
"""

from .extent import longest, means, place, span, upto
from .features import feature_moments, moments_apart, sum_features, sum_keys
from .ratio import shifted_base, sum_ratio
from .sums import gradient_sums, sum_gradient, sum_moments
from .vectors import add_rows, alike, as_row, end_pairs
from .wide import sum_divided
from .writes import read_out, write_grads

__all__ = [
    "add_rows", "alike", "as_row", "end_pairs", "feature_moments", "gradient_sums", "longest", "means",
    "moments_apart", "place", "read_out", "shifted_base", "span", "sum_divided", "sum_features",
    "sum_gradient", "sum_keys", "sum_moments", "sum_ratio", "upto", "write_grads",
]  # fmt: skip
