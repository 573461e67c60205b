"""Sizes, constexpr arguments and saved buffers of a call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....sequences import WHOLE, Sequences
from .. import plan
from ..spec import Spec, Widths, layout, operator_dtype

BLOCK = 1024
Outs = tuple[Tensor, Tensor, Tensor]  # outputs dq, dk, dv
Pair = tuple[Tensor, Tensor]  # dk and dv


class Saved(NamedTuple):
    """Tensors saved by a split forward: float32 state [B * H, K] and the operator [B * H, F, V]."""

    state: Tensor | None
    matrix: Tensor | None

    @classmethod
    def of(cls, buffer: Tensor, call: Call) -> Saved:
        """Split a buffer of `fused.saved_floats`: operators, then states."""
        lay, dtype = call.lay, operator_dtype(call.q.dtype)
        start = call.bh * lay.matrix_floats(dtype.itemsize)
        matrix = buffer[:start].view(dtype)[: call.bh * lay.fd * lay.dv]
        return cls(buffer[start : start + call.bh * lay.K].view(call.bh, lay.K), matrix.view(call.bh, lay.fd, lay.dv))


def unfused(call: Call) -> dict[str, bool]:
    """Return the launch options of kernels that compute the anchor: without fused multiply-adds, which would round
    differently in the threads that share a sum and all write it."""
    return {"enable_fp_fusion": False} if call.spec.normalize else {}


class Call:
    """Sizes and constexpr arguments shared by the launches of a call."""

    def __init__(
        self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor | None, seqs: Sequences = WHOLE
    ):
        self.b, self.most, self.h = seqs.sizes(q)
        if q.dtype == torch.float16:
            spec = spec.in_range(self.most)
        self.spec, self.q, self.k, self.v, self.coefficients = spec, q, k, v, coefficients
        # tokens of the longest sequence and what `loops.span` reads of the others; a float, because Triton compiles
        # anew for integers in tuples that are 1 or multiples of 16
        self.n = (float(self.most), *seqs.tables(self.h, spec.scales))
        self.bh, self.g = self.b * self.h, self.h // k.shape[2]
        self.planned = plan.planned(self.bh)
        self.w = Widths.of(q.shape[3], v.shape[3])
        self.flags = spec.flags()
        self.prec = plan.precisions(spec, self.w, q.dtype, self.most, self.planned)
        self.scale = spec.scale_of(self.most)
        self.lay = layout(spec, self.w)
        # products with C read dM along V, the others dM' along F
        self.turned = spec.op in ("hla2", "polynomial")

    def pick(self, *names: str) -> dict:
        """Return some of the flags."""
        return {name: self.flags[name] for name in names}

    def sizes(self) -> dict:
        """Return the constexpr arguments of a pass over tokens in the split path."""
        return {**self.w._asdict(), "L": self.lay, "PREC": self.prec["PREC"]}

    def middle_sizes(self, kernel: str) -> dict:
        """Constexpr of the D x D kernels of `plan.middle_config`."""
        lay, mid = self.lay, self.prec["MID"]
        config = plan.middle_config(kernel, self.spec, self.w, max(lay.fd, lay.dv), self.planned, mid)
        return {**self.w._asdict(), "L": lay, "MID": mid, **config}

    def ratio(self) -> Tensor | None:
        """Allocate 1 / den and d loss / d den per token [B * H, N, 2] for a normalised backward, else None."""
        return self.buffer(self.bh, self.most, 2) if self.spec.normalize else None

    def buffer(self, *shape: int | torch.SymInt, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised tensor on the device of the call."""
        return torch.empty(shape, dtype=dtype, device=self.q.device)
