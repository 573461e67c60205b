"""Host side: which kernels a call launches, in which order, with which buffers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...hla.fused.spec import alignment, precisions, strides
from ..options import BlockOptions
from . import plan
from .apply import key_grads, query_rows, read_out
from .mixing import mix, mix_exact, mixing_grads, pad_mixing, sum_parts
from .reduce import query_grads, reduce_moments, sum_values
from .spec import Moments, Sizes, flags, geometry, moments_dtype, widths

BLOCK = 1024


class Call:
    """One call's sizes and constexpr arguments, shared by its launches."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, o: BlockOptions, mask: Tensor | None):
        self.q, self.k, self.v, self.mixing, self.o = q, k, v, mixing, o
        self.b, self.n, self.h, self.d = q.shape
        self.dv = v.shape[3]
        self.bh, self.m = self.b * self.h, o.layout.n_blocks
        self.geo, self.w, self.flags = geometry(o.layout), widths(self.d, self.dv), flags(o)
        self.size = Sizes.of(o, self.n, self.d, self.dv, q.dtype)
        self.dtype = moments_dtype(q.dtype)
        self.prec = precisions(q.dtype)["PREC"]
        self.programs = self.m * self.bh
        self.keep = None if mask is None else mask.contiguous().view(torch.uint8)
        self.scale, self.scales = self.scaling(mask)

    def scaling(self, mask: Tensor | None) -> tuple[float, Tensor | None]:
        """s, and where sequences differ that of each batch, [B]."""
        if self.o.scale is not None:
            return self.o.scale * self.o.q_scale, None
        if mask is None:
            return self.o.q_scale * self.m / self.n, None
        return 1.0, self.o.q_scale * self.m / mask.sum(1).clamp(min=1).float()

    def buffer(self, *shape: int | torch.SymInt, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor on the call's device."""
        return torch.empty(shape, dtype=dtype, device=self.q.device)

    def moments(self, buffer: Tensor | None = None) -> Moments:
        """Room for moments, new or at the start of a buffer."""
        if buffer is None:
            buffer = self.buffer(self.bh * (self.size.matrix + self.size.vector))
        return Moments.of(buffer, self.bh, self.size, self.dtype)

    def sizes(self) -> tuple:
        """GEO, N, H, B H, M."""
        return self.geo, self.n, self.h, self.bh, self.m

    def token_flags(self) -> dict:
        """Constexpr of a pass over tokens."""
        return {**self.flags, **self.w, "PREC": self.prec}


def anchor_of(call: Call, out: Tensor | None) -> None:
    """The mean of v of each head. Ratios of v are the anchor plus the ratio of v - anchor, which is small where v is
    alike everywhere: what is rounded is then not what cancels in dq and dk."""
    if out is None:
        return
    bn = 32 if call.q.dtype == torch.float32 else 64
    chunk = 1024
    parts = -(-call.n // chunk)
    partial = call.buffer(parts, call.bh, call.dv)
    a = alignment(call.v)
    sum_values[(call.bh * parts,)](
        call.v, call.keep, partial, strides(call.v, a), call.n, call.h, call.bh, chunk, 1.0 / call.n, ALIGN=a,
        **{name: call.w[name] for name in ("DV", "V1", "V2")}, BN=bn, num_warps=4, num_stages=3,
    )  # fmt: skip
    add(partial, out, 1, parts, call.bh * call.dv, 32)


def add(parts: Tensor, out: Tensor, groups: int, count: int, step: int, rows: int) -> None:
    """out [groups, step] = the sum over `count` parts [groups, count, step], `rows` of them at a time: a constant of
    the caller, or another number of tokens would be another kernel."""
    columns = max(32, 4096 // rows)
    sum_parts[(-(-step // columns), groups)](parts, out, count, step, BP=rows, BE=columns, num_warps=8)


def summed(call: Call, parts: int, launch, out: Moments) -> None:
    """Let `launch(matrix, vector)` write moments: straight into `out`, or in float32 parts that are added."""
    if parts == 1:
        launch(out.matrix, out.vector)
        return
    matrix = call.programs * call.d * call.dv
    partial = call.buffer(parts, matrix)
    vector = None if out.vector is None else call.buffer(parts, call.programs * call.d)
    launch(partial, vector)
    add(partial, out.matrix, 1, parts, matrix, 8)
    if vector is not None and out.vector is not None:
        add(vector, out.vector, 1, parts, call.programs * call.d, 8)


def local_moments(call: Call, anchor: Tensor | None, out: Moments) -> None:
    """P' and z of every block."""
    config = plan.reduce_config(call.w, call.q.dtype, call.o.normalize)
    parts, chunk = plan.reduce_parts(call.programs, call.o.layout.widest, config["BN"])
    a = alignment(call.k, call.v)

    def launch(matrix: Tensor, vector: Tensor | None) -> None:
        reduce_moments[(call.programs * parts,)](
            call.k, call.v, call.keep, call.scales, anchor, None, None, matrix, vector, strides(call.k, a),
            strides(call.v, a), *call.sizes(), chunk, call.scale, ALIGN=a, RATIO=False, **call.token_flags(), **config,
        )  # fmt: skip

    summed(call, parts, launch, out)


def mixed(call: Call, x: Moments, out: Moments, turned: bool) -> None:
    """X~ = m X, `turned`: m' X."""
    mixing, per_head = call.mixing, call.mixing.dim() == 3
    heads = call.h if per_head else 1
    ms = (mixing.stride(0) if per_head else 0, *mixing.stride()[-2:])
    for part, to, columns in ((x.matrix, out.matrix, call.d * call.dv), (x.vector, out.vector, call.d)):
        if part is None or to is None:
            continue
        config, mp = plan.mix_config(call.m, part.dtype), plan.padded(call.m)
        padded = call.buffer(heads, 2, mp, mp, dtype=part.dtype)
        pad_mixing[(heads, -(-mp * mp // BLOCK))](
            mixing, padded, ms, call.m, MP=mp, TURNED=turned, BLOCK=min(BLOCK, mp * mp)
        )
        tiles = -(-call.m // config["BM"])
        common = {"C": columns, "TILES": tiles, "PER_HEAD": per_head, "MP": mp, **config}
        args = (padded, part, to, call.bh, call.h, call.m)
        if part.dtype == torch.float32:
            mix_exact[(tiles * call.bh * -(-columns // config["BC"]),)](*args, PREC="tf32x3", **common)
        else:
            parts, chunk = plan.mix_parts(call.bh, tiles, columns, config["BC"])
            mix[(tiles * call.bh * parts,)](*args, chunk, STAGES=config["num_stages"], **common)


class Saved(NamedTuple):
    """What the forward leaves for the backward: local and mixed moments and, for the ratio, the anchor [B * H, V] and
    1 / den [B * H, N]."""

    local: Moments
    mixed: Moments
    anchor: Tensor | None
    inverses: Tensor | None

    @classmethod
    def of(cls, call: Call, buffer: Tensor) -> Saved:
        """The parts of a buffer of `saved_floats`."""
        one = call.bh * (call.size.matrix + call.size.vector)
        local, mixed = call.moments(buffer), call.moments(buffer[one:])
        if not call.o.normalize:
            return cls(local, mixed, None, None)
        rest = buffer[2 * one :]
        return cls(local, mixed, rest, rest[call.bh * call.size.anchor :])


def forward_call(call: Call, out: Tensor, buffer: Tensor) -> None:
    """anchor -> reduce -> mix -> read; the buffer keeps what the backward reads."""
    saved = Saved.of(call, buffer)
    anchor_of(call, saved.anchor)
    local_moments(call, saved.anchor, saved.local)
    mixed(call, saved.local, saved.mixed, False)
    read_call(call, out, saved)


def read_call(call: Call, out: Tensor, saved: Saved) -> None:
    """o from the mixed moments."""
    _, y, anchor, inverses = saved
    config = plan.apply_config(call.w, call.q.dtype)
    parts, chunk = plan.apply_parts(call.programs, call.o.layout.widest, config["BN"])
    a = alignment(call.q, out)
    read_out[(call.programs * parts,)](
        call.q, out, inverses, call.keep, anchor, y.matrix, y.vector, strides(call.q, a), strides(out, a),
        *call.sizes(), chunk, call.o.eps, ALIGN=a, **call.token_flags(), **config,
    )  # fmt: skip


def backward_call(call: Call, g: Tensor, outs: tuple[Tensor, Tensor, Tensor], buffer: Tensor) -> Tensor:
    """dq with the gradients of mixed moments -> mix with m' -> dk, dv; returns d mixing."""
    saved = Saved.of(call, buffer)
    dy, dx = call.moments(), call.moments()
    query_call(call, g, outs[0], saved, dy)
    mixed(call, dy, dx, True)
    key_call(call, outs, dx, saved.anchor)
    return mixing_call(call, dy, saved.local)


def query_call(call: Call, g: Tensor, dq: Tensor, saved: Saved, dy: Moments) -> None:
    """dq and the gradients of the mixed moments, in one pass over the tokens or two."""
    if plan.one_pass(call.w, call.o.normalize, call.q.dtype):
        query_both_call(call, g, dq, saved, dy)
        return
    _, y, anchor, inverses = saved
    totals = call.buffer(call.bh, call.n)
    config = plan.apply_config(call.w, call.q.dtype)
    parts, chunk = plan.apply_parts(call.programs, call.o.layout.widest, config["BN"])
    a = alignment(call.q, g, dq)
    query_rows[(call.programs * parts,)](
        call.q, g, dq, inverses, totals, call.keep, anchor, y.matrix, y.vector, strides(call.q, a), strides(g, a),
        strides(dq, a), *call.sizes(), chunk, call.o.eps, ALIGN=a, **call.token_flags(), **config,
    )  # fmt: skip
    config = plan.reduce_config(call.w, call.q.dtype, call.o.normalize, ratio=True)
    parts, chunk = plan.reduce_parts(call.programs, call.o.layout.widest, config["BN"])

    def launch(matrix: Tensor, vector: Tensor | None) -> None:
        reduce_moments[(call.programs * parts,)](
            call.q, g, call.keep, None, None, inverses, totals, matrix, vector, strides(call.q, a), strides(g, a),
            *call.sizes(), chunk, 1.0, ALIGN=a, RATIO=True, **call.token_flags(), **config,
        )  # fmt: skip

    summed(call, parts, launch, dy)


def query_both_call(call: Call, g: Tensor, dq: Tensor, saved: Saved, dy: Moments) -> None:
    """dq and the gradients of the mixed moments in one pass."""
    _, y, anchor, inverses = saved
    config = plan.query_config(call.w, call.q.dtype, call.o.normalize)
    parts, chunk = plan.reduce_parts(call.programs, call.o.layout.widest, config["BN"])
    a = alignment(call.q, g, dq)

    def launch(matrix: Tensor, vector: Tensor | None) -> None:
        query_grads[(call.programs * parts,)](
            call.q, g, dq, inverses, call.keep, anchor, y.matrix, y.vector, matrix, vector, strides(call.q, a),
            strides(g, a), strides(dq, a), *call.sizes(), chunk, call.o.eps, ALIGN=a, **call.token_flags(), **config,
        )  # fmt: skip

    summed(call, parts, launch, dy)


def key_call(call: Call, outs: tuple[Tensor, Tensor, Tensor], dx: Moments, anchor: Tensor | None) -> None:
    """dk and dv from the gradients of the local moments."""
    config = plan.apply_config(call.w, call.q.dtype)
    parts, chunk = plan.apply_parts(call.programs, call.o.layout.widest, config["BN"])
    a = alignment(call.k, call.v, *outs[1:])
    key_grads[(call.programs * parts,)](
        call.k, call.v, *outs[1:], call.keep, call.scales, anchor, dx.matrix, dx.vector, strides(call.k, a),
        strides(call.v, a), strides(outs[1], a), strides(outs[2], a), *call.sizes(), chunk, call.scale, ALIGN=a,
        **call.token_flags(), **config,
    )  # fmt: skip


def mixing_call(call: Call, dy: Moments, x: Moments) -> Tensor:
    """d mixing_ib = <dP~_i, P_b> + <dz~_i, z_b>."""
    works = []
    for one, other, columns in ((dy.matrix, x.matrix, call.d * call.dv), (dy.vector, x.vector, call.d)):
        if one is not None:
            config = plan.grads_config(call.m, one.dtype)
            tiles = -(-call.m // config["BM"])
            cut = plan.column_parts(call.bh, tiles**2, columns, config["BC"])
            works.append((one, other, columns, config, tiles, *cut))
    step, first = sum(work[5] for work in works), 0
    partial = call.buffer(call.bh * step, call.m, call.m)
    for one, other, columns, config, tiles, parts, chunk in works:
        mixing_grads[(tiles * tiles * parts * call.bh,)](
            one, other, partial, call.bh, call.b, call.h, call.m, parts, chunk, step, first, C=columns, TILES=tiles,
            PREC="tf32x3", **config,
        )  # fmt: skip
        first += parts
    out = torch.empty_like(call.mixing, memory_format=torch.contiguous_format)
    groups = call.h if call.mixing.dim() == 3 else 1
    add(partial, out, groups, call.bh * step // groups, call.m * call.m, 512)
    return out
