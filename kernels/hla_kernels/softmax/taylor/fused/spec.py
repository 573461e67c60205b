"""What a launch needs to know besides its tensors: what it can run, the sizes of its buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from ....hla.fused.spec import MAX_D, MIN_D
from .plan import parts


def why_not(q: Tensor, k: Tensor, v: Tensor, narrow: bool) -> str | None:
    """The reason why the Triton form cannot run this call, or None."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {q.dtype}: taylor2 has a Triton form in bfloat16 and float16 only"
    if narrow:
        return "taylor2 with a narrow pair has no Triton form"
    for name, d in (("D", q.shape[3]), ("Dv", v.shape[3])):
        if not MIN_D <= d <= MAX_D:
            return f"{name} = {d} is outside {MIN_D}..{MAX_D}"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(3) != 1:
            return f"the last dimension of {name} is not contiguous"
    return None


def total_width(d: int, dv: int, normalize: bool) -> int:
    """Floats of one part of a key head's sums: of k, without the ratio of v, and the number of tokens; whole 16
    bytes."""
    return -(-(d + (0 if normalize else dv) + 1) // 4) * 4


def padded(n: int | torch.SymInt) -> int | torch.SymInt:
    """Numbers that a buffer has of a head's queries, as `tokens.padded`."""
    return (n + 63) // 64 * 64


def buffer_sizes(q: Tensor, k: Tensor, v: Tensor, normalize: bool, save: bool) -> list:
    """Floats of the parts of the buffer of a forward, each from 16 bytes on: sums of each key head, and with `save` two
    numbers of each query and for the ratio what rounding took from o."""
    (b, n, h, d), dv = q.shape, v.shape[3]
    rest = -(-b * n * h * dv * q.dtype.itemsize // 4) * int(normalize and save)
    return [b * k.shape[2] * parts(n) * total_width(d, dv, normalize), 2 * b * h * padded(n) * int(save), rest]
