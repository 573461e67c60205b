"""Kernel launches and buffers of a call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...dispatch.recording import launch
from ...hla.fused.launch import group_sum
from ...hla.fused.spec import Widths, alignment, strides
from ..options import BlockOptions
from . import plan
from .apply import key_grads, query_rows, read_out
from .mixing import add, mixed, mixed_back
from .orders.grads import key_products, query_products
from .orders.middle import left_grads, operators, right_grads
from .reduce import query_grads, reduce_moments, sum_values
from .spec import Moments, Sizes, flags, geometry, moment_precisions, moments_dtype, precision

Rotary = tuple[Tensor, Tensor] | None


class Call:
    """Sizes and constexpr arguments shared by the launches of a call."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, o: BlockOptions, mask: Tensor | None, rotary: Rotary,
        share: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.q, self.k, self.v, self.mixing, self.o = q, k, v, mixing, o
        self.b, self.n, self.h, self.d = q.shape
        self.dv, self.group = v.shape[3], self.h // k.shape[2]
        self.bh, self.m = self.b * self.h, o.layout.n_blocks
        self.geo, self.w, self.flags = geometry(o.layout, share), Widths.of(self.d, self.dv), flags(o, rotary)
        # a softmax's Jacobian removes the part of gradients that all features share: one digit would leave its rounding
        self.fine = o.feature_map == "softmax"
        self.whole = self.flags["TURN"] > 1  # a rotation needs both halves of the channels
        self.dtype = moments_dtype(q.dtype, o, rotary is not None)
        self.size = Sizes.of(o, self.n, self.d, self.dv, self.dtype)
        self.prec, (self.mix, self.mid) = precision(q.dtype, o), moment_precisions(q.dtype, o)
        self.programs = self.m * self.bh
        self.keep = None if mask is None else mask.contiguous().view(torch.uint8)
        # 1 / tokens of a sample, [B]
        self.shares = None if mask is None else 1.0 / mask.sum(1).clamp(min=1).float()
        self.scale, self.scales = self.scaling()
        # contiguous, so that a row of angles is one load; float16 (11 bits) is enough for bfloat16 features (8 bits)
        exact = q.dtype != torch.bfloat16 or o.moments == "float32"
        angles = torch.float32 if exact else torch.float16
        self.angles = (None, None) if rotary is None else tuple(x.to(angles).contiguous() for x in rotary)
        self.ht = 1 if rotary is None or rotary[0].dim() == 2 else self.h

    def scaling(self) -> tuple[float, Tensor | None]:
        """Return s, and s per sample [B] if sequences differ, else None."""
        if self.o.scale is not None:
            return self.o.scale * self.o.q_scale, None
        if self.shares is None:
            return self.o.q_scale * self.m / self.n, None
        return 1.0, self.o.q_scale * self.m * self.shares

    def buffer(self, *shape: int | torch.SymInt, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised tensor on the device of the call."""
        return torch.empty(shape, dtype=dtype, device=self.q.device)

    def moments(self, buffer: Tensor | None = None) -> Moments:
        """Allocate moments, or place them at the start of a buffer."""
        buffer = self.buffer(self.bh * self.size.moments) if buffer is None else buffer
        return Moments.of(buffer, self.bh, self.size, self.dtype)

    def operators(self, buffer: Tensor | None = None) -> Moments:
        """Allocate the operators, or their gradients, or place them at the start of a buffer."""
        size = self.size._replace(left=0)
        buffer = self.buffer(self.bh * size.moments) if buffer is None else buffer
        return Moments.of(buffer, self.bh, size, self.dtype)

    def sizes(self) -> tuple:
        """Return GEO, N, H, B H, M."""
        return self.geo, self.n, self.h, self.bh, self.m

    def token_flags(self) -> dict:
        """Return the constexpr arguments of a pass over tokens."""
        return {**self.flags, **self.w._asdict(), "PREC": self.prec}

    def rows_config(self, name: str) -> dict[str, int]:
        """Return the tiles of a pass that writes rows."""
        digits = self.digits if name == "read" else max(self.digits, 1 + self.fine)  # of features or operators
        return plan.apply_config(self.w, self.q.dtype, name, self.o.normalize, digits)

    @property
    def digits(self) -> int:
        """Return the number of digits (values in the dtype of the tokens) per feature."""
        return (3 if self.flags["EXACT"] else 2) if self.flags["TURN"] and self.q.dtype != torch.float32 else 1


def anchor_of(call: Call, out: Tensor | None) -> None:
    """Compute the anchor, the mean of v per head over all tokens.

    A ratio of v is the anchor plus the ratio of v - anchor. The latter is small if values are similar, so rounding does
    not affect the part that cancels in dq and dk.
    """
    if out is None or call.flags["TURN"]:  # with rotation, numerator and denominator have different weights
        return
    bn = 32 if call.q.dtype == torch.float32 else 64
    parts, chunk = plan.anchor_parts(call.n, call.bh, bn)
    partial = out if parts == 1 else call.buffer(parts, call.bh, call.dv)
    a = alignment(call.v)
    launch(
        sum_values, call.bh * parts,
        call.v, call.keep, call.shares, partial, strides(call.v, a), call.n, call.h, call.bh, call.group, chunk,
        1.0 / call.n, ALIGN=a, V=call.w.V, BN=bn, num_warps=4, num_stages=3,
    )  # fmt: skip
    if parts > 1:
        add(partial, out, 1, parts, call.bh * call.dv, 32)


class Source(NamedTuple):
    """Factors of `sum_over`: x with features (`group` heads share one) and y; pair: y has features too; ratio: 1 / den
    and d loss / d den."""

    x: Tensor
    group: int
    y: Tensor
    y_group: int
    pair: bool = False
    ratio: tuple[Tensor, Tensor] | None = None


def sum_over(call: Call, s: Source, anchor: Tensor | None, matrix: Tensor, vector: Tensor | None, local: bool) -> None:
    """Sum y phi(x)' over every block, and with `vector` also phi(x); `local`: times s."""
    w = call.w if not s.pair else call.w._replace(V=call.w.F)
    ratio = s.ratio is not None
    digits = 3 if call.flags["EXACT"] else call.digits * (1 + s.pair)
    config = plan.reduce_config(w, call.q.dtype, vector is not None, ratio, digits)
    size = call.programs * w.F.D * w.V.D
    w, config = plan.divided(w, config, call.whole or s.pair)
    parts, chunk = plan.reduce_parts(call.programs, call.o.layout.widest, config["BN"])
    a = alignment(s.x, s.y)
    flags = {**call.token_flags(), **w._asdict(), "NORM": vector is not None}
    to, to_vector = matrix, vector
    if parts > 1:  # float32 parts are added by another kernel
        to = call.buffer(parts, size)
        to_vector = None if vector is None else call.buffer(parts, call.programs * call.d)
    launch(
        reduce_moments, call.programs * parts * config["SPLIT"],
        s.x, s.y, call.keep, call.scales if local else None, anchor, *(s.ratio or (None, None)), *call.angles, to,
        to_vector, strides(s.x, a), strides(s.y, a), *call.sizes(), s.group, s.y_group, call.ht, chunk,
        call.scale if local else 1.0, ALIGN=a, RATIO=ratio, PAIR=s.pair,
        ROWS=plan.rows_at_once(w, call.q.dtype, config), **flags, **config,
    )  # fmt: skip
    added(call, to, to_vector, matrix, vector, parts, size)


def added(
    call: Call, to: Tensor, to_vector: Tensor | None, matrix: Tensor, vector: Tensor | None, parts: int, size: int
) -> None:
    """Add the parts of moments."""
    if parts > 1:
        add(to, matrix, 1, parts, size, 8)
        if vector is not None and to_vector is not None:
            add(to_vector, vector, 1, parts, call.programs * call.d, 8)


def local_moments(call: Call, anchor: Tensor | None, out: Moments) -> None:
    """Compute P' and z (hla2: C' and the sums of phi(q)), and the left factor R' or S of higher orders."""
    q, k, v, g = call.q, call.k, call.v, call.group
    source = Source(q, 1, v, g) if call.o.order == "hla2" else Source(k, g, v, g)
    sum_over(call, source, anchor, out.matrix, out.vector, True)
    if out.left is not None:
        source = Source(k, g, k, g, True) if call.o.order == "hla2" else Source(k, g, q, 1, True)
        sum_over(call, source, None, out.left, None, True)


class Saved(NamedTuple):
    """Tensors saved for the backward: local and mixed moments and, for the ratio, the anchor [B * H, V] and 1 / den
    [B * H, N]."""

    local: Moments
    mixed: Moments
    anchor: Tensor | None
    inverses: Tensor | None

    @classmethod
    def of(cls, call: Call, buffer: Tensor) -> Saved:
        """Split a buffer of `saved_floats` floats."""
        one = call.bh * call.size.moments
        local, mixed = call.moments(buffer), call.moments(buffer[one:])
        if not call.o.normalize:
            return cls(local, mixed, None, None)
        rest = buffer[2 * one :]
        return cls(local, mixed, rest, rest[call.bh * call.size.anchor :])


def forward_call(call: Call, out: Tensor, buffer: Tensor) -> None:
    """Launch anchor -> reduce -> mix -> (multiply) -> read; the buffer holds the tensors for the backward."""
    saved = Saved.of(call, buffer)
    anchor_of(call, saved.anchor)
    local_moments(call, saved.anchor, saved.local)
    mixed_call(call, out, saved)


def mixed_call(call: Call, out: Tensor, saved: Saved) -> None:
    """Compute o from the local moments."""
    mixed(call, saved.local, saved.mixed)
    read_call(call, out, operator_of(call, saved.mixed), saved)


class Operator(NamedTuple):
    """Operator per block of queries, matrix and vector as in `Moments`, and for a ratio of a higher order its shift
    [M, B * H, V]."""

    matrix: Tensor
    vector: Tensor | None
    shift: Tensor | None = None


def operator_of(call: Call, x: Moments) -> Operator:
    """Return the mixed moment, or the product of two mixed moments."""
    if x.left is None:
        return Operator(x.matrix, x.vector)
    room = call.operators()
    shift = None if room.vector is None else call.buffer(call.programs * call.dv)
    out = Operator(room.matrix, room.vector, shift)
    programs, common = plan.product_grid(call.w, call.w.V.D, call.programs)
    launch(operators, programs, x.matrix, x.vector, x.left, *out, **call.w._asdict(), PREC=call.mid, **common)
    return out


def read_call(call: Call, out: Tensor, y: Operator, saved: Saved) -> None:
    """Compute o from the operators."""
    config = call.rows_config("read")
    parts, chunk = plan.apply_parts(call.programs, call.o.layout.widest, config["BN"])
    a = alignment(call.q, out)
    launch(
        read_out, call.programs * parts,
        call.q, out, saved.inverses, call.keep, saved.anchor, y.shift, *call.angles, y.matrix, y.vector,
        strides(call.q, a), strides(out, a), *call.sizes(), call.ht, chunk, call.o.eps, ALIGN=a, **call.token_flags(),
        **config,
    )  # fmt: skip


Grads = tuple[Tensor, Tensor, Tensor]


def backward_call(call: Call, g: Tensor, outs: Grads, buffer: Tensor) -> Tensor:
    """Launch the gradients of operators (with dq in first order) -> of mixed moments -> of local moments (mixing with
    m') -> of tokens; return d mixing."""
    saved, dy = Saved.of(call, buffer), call.operators()
    operator = operator_of(call, saved.mixed)
    totals = query_call(call, g, outs[0], operator, saved, dy)
    return token_grads_call(call, g, outs, operator, saved, dy, totals)


def token_grads_call(
    call: Call, g: Tensor, outs: Grads, operator: Operator, saved: Saved, d_operator: Moments, totals: Tensor | None
) -> Tensor:
    """Compute dk and dv, and dq of a higher order, from the gradients of the operators; return d mixing."""
    room = outs if call.group == 1 else (outs[0], *head_grads(call))
    dx = call.moments()
    if call.o.order == "la":
        dm = mixed_back(call, d_operator, saved.local, dx)
        key_call(call, room, dx, saved.anchor)
    else:
        dy = call.moments()
        factor_grads(call, saved.mixed, operator.shift, d_operator, dy)
        dm = mixed_back(call, dy, saved.local, dx)
        product_call(call, g, room, operator, dx, saved, totals)
    if call.group > 1:
        for part, out in zip(room[1:], outs[1:], strict=True):
            group_sum(part, out, call.group)
    return dm


def head_grads(call: Call) -> tuple[Tensor, Tensor]:
    """Allocate gradients of k and v per query head; padded tokens are not written."""
    new = torch.empty if call.keep is None else torch.zeros
    k, v = (new((call.b, call.n, call.h, w), dtype=torch.float32, device=call.q.device) for w in (call.d, call.dv))
    return k, v


def query_call(call: Call, g: Tensor, to: Tensor, y: Operator, saved: Saved, dy: Moments) -> Tensor | None:
    """Compute the gradients of the operators y and, in first order, dq, in one or two passes over the tokens; return
    d loss / d den if it was computed."""
    dq = to if call.o.order == "la" else None
    if dq is not None and plan.one_pass(call.w, call.o.normalize, call.q.dtype, call.digits):
        query_both_call(call, g, dq, y, saved, dy)
        return None
    ratio, totals = None, None
    if call.o.normalize:
        assert saved.inverses is not None
        totals = call.buffer(call.bh, call.n)
        ratio = (saved.inverses, totals)
        totals_call(call, g, dq, y, saved, totals)
    sum_over(call, Source(call.q, 1, g, 1, ratio=ratio), None, dy.matrix, dy.vector, False)
    return totals


def totals_call(call: Call, g: Tensor, dq: Tensor | None, y: Operator, saved: Saved, totals: Tensor) -> None:
    """Compute d loss / d den of the ratio, and dq unless it is None."""
    config = call.rows_config("rows")
    parts, chunk = plan.apply_parts(call.programs, call.o.layout.widest, config["BN"])
    rows = [call.q, g] if dq is None else [call.q, g, dq]
    a = alignment(*rows)
    launch(
        query_rows, call.programs * parts,
        call.q, g, dq, saved.inverses, totals, call.keep, saved.anchor, y.shift, *call.angles, y.matrix,
        y.vector, strides(call.q, a), strides(g, a), strides(rows[-1], a), *call.sizes(), call.ht, chunk, call.o.eps,
        ALIGN=a, FINE=call.fine, **call.token_flags(), **config,
    )  # fmt: skip


def query_both_call(call: Call, g: Tensor, dq: Tensor, y: Operator, saved: Saved, dy: Moments) -> None:
    """Compute dq and the gradients of the mixed moments in one pass."""
    config = plan.query_config(call.w, call.q.dtype, call.o.normalize, call.digits)
    w, config = plan.divided(call.w, config, call.whole or call.o.normalize)
    parts, chunk = plan.reduce_parts(call.programs, call.o.layout.widest, config["BN"])
    a = alignment(call.q, g, dq)
    size, to, to_vector = call.programs * call.d * call.dv, dy.matrix, dy.vector
    if parts > 1:
        to = call.buffer(parts, size)
        to_vector = None if dy.vector is None else call.buffer(parts, call.programs * call.d)
    launch(
        query_grads, call.programs * parts * config["SPLIT"],
        call.q, g, dq, saved.inverses, call.keep, saved.anchor, *call.angles, y.matrix, y.vector, to, to_vector,
        strides(call.q, a), strides(g, a), strides(dq, a), *call.sizes(), call.ht, chunk, call.o.eps, ALIGN=a,
        FINE=call.fine, **{**call.token_flags(), **w._asdict()}, **config,
    )  # fmt: skip
    added(call, to, to_vector, dy.matrix, dy.vector, parts, size)


def key_call(call: Call, outs: Grads, dx: Moments, anchor: Tensor | None) -> None:
    """Compute dk and dv of first order from the gradients of the local moments."""
    config = call.rows_config("key")
    parts, chunk = plan.apply_parts(call.programs, call.o.layout.widest, config["BN"])
    a = alignment(call.k, call.v, *outs[1:])
    launch(
        key_grads, call.programs * parts,
        call.k, call.v, *outs[1:], call.keep, call.scales, anchor, *call.angles, dx.matrix, dx.vector,
        strides(call.k, a), strides(call.v, a), strides(outs[1], a), strides(outs[2], a), *call.sizes(), call.group,
        call.ht, chunk, call.scale, ALIGN=a, FINE=call.fine, **call.token_flags(), **config,
    )  # fmt: skip


def factor_grads(call: Call, x: Moments, shift: Tensor | None, d_operator: Moments, dy: Moments) -> None:
    """Compute the gradients of the mixed factors of each operator from the gradient of the operator."""
    for kernel, height, outs in (
        (right_grads, call.w.V.D, (dy.matrix, dy.vector)), (left_grads, call.w.F.D, (dy.left,)),
    ):  # fmt: skip
        programs, common = plan.product_grid(call.w, height, call.programs)
        launch(
            kernel, programs,
            x.matrix, x.vector, x.left, d_operator.matrix, d_operator.vector, shift, *outs, **call.w._asdict(),
            PREC=call.mid, **common,
        )  # fmt: skip


def product_call(
    call: Call, g: Tensor, outs: Grads, y: Operator, dx: Moments, saved: Saved, totals: Tensor | None
) -> None:
    """Compute dq, then dk and dv of a higher order, from the read-out and the gradients of the local moments."""
    q, k, v, hla2 = call.q, call.k, call.v, call.o.order == "hla2"
    config = call.rows_config("products")
    parts, chunk = plan.apply_parts(call.programs, call.o.layout.widest, config["BN"])
    ratio, programs, flags = (saved.inverses, totals), call.programs * parts, {**call.token_flags(), **config}
    other = v if hla2 else k
    a = alignment(q, g, other, outs[0])
    launch(
        query_products, programs,
        q, g, other, outs[0], *ratio, call.keep, call.scales, saved.anchor, *call.angles, y.matrix, y.vector,
        dx.matrix, dx.vector, dx.left, *(strides(x, a) for x in (q, g, other, outs[0])), *call.sizes(), call.group,
        call.ht, chunk, call.scale, HLA2=hla2, ALIGN=a, **flags,
    )  # fmt: skip
    a = alignment(q, k, v, *outs[1:])
    for part in plan.key_passes(call.w, call.digits):
        launch(
            key_products, programs,
            q, k, v, *outs[1:], call.keep, call.scales, saved.anchor, *call.angles, dx.matrix, dx.vector, dx.left,
            *(strides(x, a) for x in (q, k, v, *outs[1:])), *call.sizes(), call.group, call.ht, chunk, call.scale,
            PART=part, HLA2=hla2, ALIGN=a, **flags,
        )  # fmt: skip
