"""Sizes, constexpr arguments and saved buffers of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....dispatch.recording import launch
from ....sequences import Sequences
from .. import plan
from ..spec import Spec, layout, operator_dtype, placed, summed_factors, summed_floats

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
        self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor | None, seqs: Sequences,
        path: str = "split",
    ) -> None:  # fmt: skip
        self.b, self.most, self.h = seqs.sizes(q)
        if q.dtype == torch.float16:
            spec = spec.in_range(self.most)
        self.spec, self.q, self.tokens, self.coefficients = spec, q, (q, k, v), coefficients
        # tokens of the longest sequence and what `loops.span` reads of the others; a float, because Triton compiles
        # anew for integers in tuples that are 1 or multiples of 16
        self.n = (float(self.most), *seqs.tables(self.h, spec.scales))
        self.bh, self.g = self.b * self.h, self.h // k.shape[2]
        self.planned = plan.planned(self.bh)
        self.w = spec.widths(q.shape[3], v.shape[3])
        self.flags = {
            "ORDER": spec.op, "NORM": spec.normalize, "CENTER": spec.center, "MEAN": spec.mean_path,
            "RIDGE": spec.ridge != 0.0,
        }  # fmt: skip
        self.prec = plan.precisions(spec, self.w, q.dtype, self.most, self.planned)
        self.scale = spec.scale_of(self.most)
        lay = layout(spec, self.w)
        self.lay = lay if path.endswith("split") else lay.vectors()  # one program per head keeps no moments
        self.summed = path == "summed"
        # products with C read dM along V, the others dM' along F
        self.turned = spec.op in ("hla2", "polynomial") and not self.summed

    def pick(self, *names: str) -> dict:
        """Return some of the flags."""
        return {name: self.flags[name] for name in names}

    def sizes(self) -> dict:
        """Return the constexpr arguments of a pass over tokens in the split path."""
        return {**self.w._asdict(), "L": self.lay, "PREC": self.prec["PREC"]}

    def over_tokens(
        self, kernel: Any, parts: int, tokens: Sequence[Tensor | None], pointers: Sequence[Tensor | None],
        numbers: tuple, **options: Any,
    ) -> None:  # fmt: skip
        """Launch a pass over the tokens of every head in `parts` programs. tokens: the first arguments of the kernel,
        whose strides follow the `pointers` (of an absent one: of the first); numbers: its arguments behind N, H."""
        at, a = placed(*(tokens[0] if x is None else x for x in tokens))
        launch(
            kernel, self.bh * parts, *tokens, *pointers, *at, self.n, self.h, *numbers, ALIGN=a,
            **{**self.sizes(), **options},
        )  # fmt: skip

    def write_tokens(
        self, kernel: Any, config: dict, tokens: Sequence[Tensor | None], pointers: Sequence[Tensor | None],
        before: tuple = (), behind: tuple = (), long: bool = False, **flags: Any,
    ) -> None:  # fmt: skip
        """Launch a pass that writes tokens; its numbers are `before`, the parts of a head, their tokens, `behind`."""
        parts, chunk = plan.apply_parts(self.w, self.planned, self.most, config["BN"], long)
        programs = parts * config.get("ROLES", 1)
        self.over_tokens(kernel, programs, tokens, pointers, (*before, parts, chunk, *behind), **flags, **config)

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


class Kept(NamedTuple):
    """Saved tensors per head: vectors [B * H, K] in float32, the operator [B * H, D, D], float16 factors and units."""

    vectors: Tensor
    matrix: Tensor
    factors: Tensor
    units: Tensor

    @classmethod
    def of(cls, buffer: Tensor, call: Call) -> Kept:
        """Split a buffer of `spec.summed_floats`."""
        lay, dtype = call.lay, call.q.dtype
        lengths = [call.bh * x for x in summed_floats(call.spec, call.w, dtype)]
        units, vectors, matrix, factors = buffer[: sum(lengths)].split(lengths)
        matrix = matrix.view(dtype)[: call.bh * lay.fd * lay.dv].view(call.bh, lay.fd, lay.dv)
        return cls(vectors, matrix, factors.view(torch.float16), units)

    @classmethod
    def none(cls, call: Call, o: Tensor) -> Kept:
        """Return tensors for a forward that saves nothing: memory for factors of a ratio that go through memory,
        otherwise o as a placeholder."""
        if call.w.F.D2 == 0 or not call.spec.normalize:
            return cls(o, o, o, o)
        factors = call.buffer(call.bh, summed_factors(call.spec.op), call.w.F.padded**2, dtype=torch.float16)
        return cls(o, o, factors, call.buffer(call.bh, 4))
