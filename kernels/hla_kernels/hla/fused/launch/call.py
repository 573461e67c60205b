"""Sizes, constexpr arguments and saved buffers of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....sequences import WHOLE, Sequences
from .. import plan
from ..spec import Spec, alignment, layout, strides, widths

BLOCK = 1024
Outs = tuple[Tensor, Tensor, Tensor]  # where dq, dk, dv go
Features = tuple[Tensor | None, Tensor | None]  # phi(q) and phi(k) (less their shift) that a forward keeps, or none


class Saved(NamedTuple):
    """What a split forward keeps for its backward: float32 state [B * H, K] and the operator [B * H, F, V]."""

    state: Tensor | None
    matrix: Tensor | None

    @classmethod
    def of(cls, buffer: Tensor, call: Call) -> Saved:
        """The parts of a buffer of `fused.saved_floats`: the operators, then the states."""
        lay, dtype = call.lay, call.matrix_dtype
        start = call.bh * lay.matrix_floats(dtype.itemsize)
        matrix = buffer[:start].view(dtype)[: call.bh * lay.fd * lay.dv]
        return cls(buffer[start : start + call.bh * lay.k].view(call.bh, lay.k), matrix.view(call.bh, lay.fd, lay.dv))


def pad(d: int) -> int:
    """The next power of two, at least 16."""
    return max(16, 1 << (d - 1).bit_length())


def unfused(call: Call) -> dict[str, bool]:
    """Of kernels that compute the anchor: a fused sum is another one in each of the threads that share it, and they all
    write it."""
    return {"enable_fp_fusion": False} if call.spec.normalize else {}


def staged(config: dict[str, int]) -> dict[str, int]:
    """The tiles of a pass of sums, which needs its number of stages inside too."""
    return {**config, "STAGES": config["num_stages"]}


class Call:
    """One call's sizes and constexpr arguments, shared by its launches."""

    def __init__(
        self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor | None, seqs: Sequences = WHOLE
    ):
        self.b, self.most, self.h = seqs.sizes(q)
        if q.dtype == torch.float16:
            spec = spec.in_range(q.shape[3], self.most)
        self.spec, self.q, self.k, self.v, self.coefficients, self.seqs = spec, q, k, v, coefficients, seqs
        # tokens of the longest sequence and what `loops.span` reads of the others; a float, because Triton compiles
        # anew for integers in tuples that are 1 or multiples of 16
        self.n = (float(self.most), *seqs.tables(self.h, spec.scale, spec.q_scale, spec.of_differences))
        self.bh, self.g = self.b * self.h, self.h // k.shape[2]
        self.planned = plan.planned(self.bh)
        self.w = widths(spec, q.shape[3], v.shape[3])
        self.flags = spec.flags(q.dtype)
        self.prec = plan.precisions(spec, self.w, q.dtype, self.most, self.planned)
        self.scale = spec.scale_of(self.most)
        # float16 weights are cast where they are used, in units of a power of two; those that rows are taken of there
        # after that
        self.shifted = spec.shifted(q.dtype)
        late = q.dtype == torch.float16 or (self.shifted and not spec.normalize) or spec.softmax
        self.weights_dtype = torch.float32 if late else q.dtype
        self.matrix_dtype = spec.matrix_dtype(q.dtype)
        self.lay = layout(spec, self.w)
        self.features: Features = (None, None)
        # products with C read dM along V, the others dM' along F
        self.turned = spec.op in ("hla2", "polynomial")

    def own(self) -> bool:
        """Whether every token is real and every head has its own keys."""
        return self.seqs.mask is None and self.seqs.cu_seqlens is None and self.g == 1

    def tiles(self, entry: Callable[..., dict[str, int]], *args: Any) -> dict[str, int]:
        """Return tiles, warps and stages of a kernel, `entry(*args)` of the static table. Starts of programs are
        staggered (`heads.stagger`) if a launch lasts long enough. On a CPU, where the interpreter does not support
        inline assembly, there is no stagger and no STAY in L2."""
        config = entry(*args)
        assembly = self.q.device.type != "cpu"
        if "STAY" in config and not assembly:
            config = {**config, "STAY": False}
        if "DELAY" in config and not (assembly and plan.lasts(self.bh, self.most)):
            config = {**config, **plan.AT_ONCE}
        return config

    def pick(self, *names: str) -> dict:
        """Some of the flags."""
        return {name: self.flags[name] for name in names}

    def sizes(self) -> dict:
        """Constexpr of a pass over tokens of the split path."""
        return {**self.w, "FD": self.lay.fd, "OFF": self.lay.off, "K": self.lay.k, "PREC": self.prec["PREC"]}

    def middle_sizes(self, kernel: str, exact: str) -> dict:
        """Constexpr of the D x D kernels of `plan.middle_config` whose products have the precision `exact` of
        `plan.precisions`."""
        lay, prec = self.lay, self.prec | {"MID": self.prec[exact]}
        tiles = {name: self.w[name] for name in ("F1", "F2", "DV", "V1", "V2")}
        rows = max(lay.fd, lay.dv)
        config = self.tiles(plan.middle_config, kernel, self.spec, self.w, rows, self.planned, prec)
        return {**tiles, "FD": lay.fd, "OFF": lay.off, "K": lay.k, "MID": prec["MID"], **config}

    def ratio(self) -> Tensor | None:
        """What the backward of the normalised form keeps of every token [B * H, N, 2]."""
        return self.buffer(self.bh, self.most, 2) if self.spec.normalize else None

    def buffer(self, *shape: int | torch.SymInt, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor on the call's device."""
        return torch.empty(shape, dtype=dtype, device=self.q.device)


def placed(*tensors: Tensor | None) -> tuple[tuple[tuple[int, int, int], ...], int]:
    """The strides of each in units of the alignment of all, and that; zeros of None."""
    a = alignment(*(x for x in tensors if x is not None))
    return tuple((0, 0, 0) if x is None else strides(x, a) for x in tensors), a


def area(call: Call) -> int:
    """Numbers of a padded matrix."""
    return (call.w["F1"] + call.w["F2"]) ** 2


def half_room(call: Call, matrices: int) -> Tensor:
    """Room for float16 matrices of every head."""
    return call.buffer(call.bh, matrices * area(call), dtype=torch.float16)
