"""Passes over the tokens of one head. Every kernel combines one or more of them with the D x D algebra of one head.

q, k, v, g, o point at the first token of the head; strides are in elements. q and k have the width F, v and g
the width V (`spec.Width`).

    sum_moments   P = Sum k v'  S = Sum k k'  C = Sum q v'  R = Sum k q'  W = Sum q q', token sums, and dM' = Sum g q'
    sum_gradient  dM' = Sum g q' alone
    sum_ratio     dm1 and dM' through the division, and dq of the first order
    sum_divided   the same sums of wide heads, from numbers that a pass before it wrote (`wide`)
    read_out      o = q M + row, or q M / (q.m1 + eps)
    write_grads   dq, dk, dv from the weights of `algebra.weights`
"""

from .extent import longest, means, place, span, upto
from .ratio import sum_ratio
from .sums import sum_gradient, sum_moments
from .vectors import as_row, end_pairs
from .wide import sum_divided
from .writes import read_out, write_grads

__all__ = [
    "as_row", "end_pairs", "longest", "means", "place", "read_out", "span", "sum_divided", "sum_gradient",
    "sum_moments", "sum_ratio", "upto", "write_grads",
]  # fmt: skip
