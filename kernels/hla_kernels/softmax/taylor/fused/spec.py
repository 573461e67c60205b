"""Supported calls and buffer sizes of the Triton form."""

from __future__ import annotations

import torch
from torch import Tensor

from ....hla.fused.spec import MAX_D, MIN_D
from .plan import parts


def why_not(q: Tensor, k: Tensor, v: Tensor, q2: Tensor | None, k2: Tensor | None) -> str | None:
    """Return the reason why the Triton form does not support this call, or None."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {q.dtype}: taylor2 has a Triton form in bfloat16 and float16 only"
    for name, d in (("D", q.shape[3]), ("Dv", v.shape[3])):
        if not MIN_D <= d <= MAX_D:
            return f"{name} = {d} is outside {MIN_D}..{MAX_D}"
    if q2 is not None and not 1 <= q2.shape[3] <= q.shape[3]:
        return f"the narrow pair's R = {q2.shape[3]} is outside 1..D = {q.shape[3]}"
    for name, x in (("q", q), ("k", k), ("v", v), ("narrow q", q2), ("narrow k", k2)):
        if x is not None and x.stride(3) != 1:
            return f"the last dimension of {name} is not contiguous"
    return None


def total_width(d: int, r: int, dv: int, normalize: bool) -> int:
    """Return the floats per key head and part for the sums of k, narrow k, v (without the ratio) and the number of
    tokens; a multiple of 16 bytes."""
    return -(-(d + r + (0 if normalize else dv) + 1) // 4) * 4


def padded(n: int | torch.SymInt) -> int | torch.SymInt:
    """Return the padded number of queries per head in a buffer, as `tokens.padded`."""
    return (n + 63) // 64 * 64


def buffer_sizes(q: Tensor, k: Tensor, v: Tensor, q2: Tensor | None, normalize: bool, save: bool) -> list:
    """Return the floats of each section of the forward's buffer, aligned to 16 bytes: sums per key head; with `save`
    also two numbers per query (three with a narrow pair) and, for the ratio, the rounding error of o."""
    (b, n, h, d), dv, r = q.shape, v.shape[3], 0 if q2 is None else q2.shape[3]
    rest = -(-b * n * h * dv * q.dtype.itemsize // 4) * int(normalize and save)
    rows = (2 if q2 is None else 3) * b * h * padded(n) * int(save)
    return [b * k.shape[2] * parts(n) * total_width(d, r, dv, normalize), rows, rest]
