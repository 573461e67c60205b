"""Loads, stores and products of token rows in Triton. Scores are base-2 logarithms: weights are 2^score."""

import triton
import triton.language as tl


@triton.jit
def of_head(ptr, strides, b, h):
    """Return the pointer to token 0 of a head; strides: of batch, token and head."""
    return ptr + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[2]


@triton.jit
def load(ptr, row, stride, inside, D: tl.constexpr, DP: tl.constexpr):
    """Load rows of D channels as [., DP], with zeros outside."""
    d = tl.arange(0, DP)
    at = ptr + row.to(tl.int64)[:, None] * stride + d[None, :]
    return tl.load(at, inside[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store(ptr, row, stride, inside, x, D: tl.constexpr, DP: tl.constexpr):
    """Store rows of D channels from [., DP], the inverse of `load`."""
    d = tl.arange(0, DP)
    at = ptr + row.to(tl.int64)[:, None] * stride + d[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), inside[:, None] & (d < D)[None, :])


@triton.jit
def products(x, y):
    """Return x_i.y_j, [I, J]."""
    return tl.dot(x, tl.trans(y), input_precision="ieee")


@triton.jit
def weighted(acc, w, x):
    """Return acc + w x."""
    return tl.dot(w.to(x.dtype), x, acc, input_precision="ieee")
