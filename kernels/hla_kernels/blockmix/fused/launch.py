"""Kernel launches and buffers of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch.recording import launch
from ...hla.fused.launch import head_grads, sum_heads
from ...hla.fused.spec import Widths, placed
from ..layout import BlockOptions
from . import plan
from .apply import blockmix_query_grads, blockmix_query_products, blockmix_read_out, blockmix_token_grads
from .mixing import add, mixed, mixed_back
from .orders import blockmix_left_grads, blockmix_operators, blockmix_right_grads
from .reduce import blockmix_reduce_moments, blockmix_sum_values
from .spec import Moments, Saved, Sizes, moment_precisions, precision, widths

Rotary = tuple[Tensor, Tensor] | None
Grads = tuple[Tensor, Tensor, Tensor]
Sums = tuple[Tensor, Tensor | None]  # matrices and vectors


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
        (grid, blocks, prefix), ones = o.layout, (1,) * (3 - len(o.layout.grid))
        self.geo = (prefix, *ones, *grid, *ones, *blocks, share)  # GEO of `geometry`; share: of a device
        turn = None if rotary is None else "halves" if o.rotary_half else "pairs"
        self.w = widths(self.d, self.dv, rotary is not None)
        self.flags = {"NORM": o.normalize, "TURN": turn, "EXACT": o.moments == "float32"}  # of passes over tokens
        # a softmax's Jacobian removes the part of gradients that all features share: one digit would leave its rounding
        self.fine = o.feature_map == "softmax"
        self.size = Sizes.of(q, v, o, rotary is not None)
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

    def moments(self, size: Sizes) -> Moments:
        """Allocate moments (`self.size`), or operators or their gradients (`self.size.operators()`)."""
        return Moments.of(self.buffer(size.moments), size)

    def sharing(self, x: Tensor | None) -> int:
        """Return how many query heads share a head of x."""
        return 1 if x is None else self.h // x.shape[2]

    def sizes(self) -> tuple:
        """Return GEO, N, H, B H, M, G, HT."""
        return self.geo, self.n, self.h, self.bh, self.m, self.group, self.ht

    def token_flags(self) -> dict:
        """Return the constexpr arguments of a pass over tokens."""
        return {**self.flags, **self.w._asdict(), "PREC": self.prec}

    def write_rows(
        self, kernel: Any, name: str, pointers: Sequence[Tensor | None], rows: Sequence[Tensor | None], last: tuple,
        **flags: Any,
    ) -> None:  # fmt: skip
        """Launch a pass over the tokens that writes rows with the tiles of `name`. rows: the tensors whose strides it
        takes; last: its last numbers."""
        digits = self.digits if name == "read" else max(self.digits, 1 + self.fine)  # of features or operators
        config = plan.apply_config(self.w, self.q.dtype, name, self.o.normalize, digits)
        parts, chunk = plan.apply_parts(self.programs, self.o.layout.widest, config["BN"])
        at, a = placed(*rows)
        launch(
            kernel, self.programs * parts, *pointers, *at, *self.sizes(), chunk, *last, ALIGN=a,
            **self.token_flags(), **flags, **config,
        )  # fmt: skip

    def sum_rows(
        self, kernel: Any, w: Widths, config: plan.Config, pointers: Sequence[Tensor | None], to: Sums,
        rows: Sequence[Tensor], last: tuple, **flags: Any,
    ) -> None:  # fmt: skip
        """Launch a pass over the tokens that sums matrices [V, F] and perhaps vectors, `to`: in float32 parts, which
        another kernel adds, if one program per block would leave the GPU idle. w: widths of one program."""
        split = config.get("SPLIT", 1)
        sizes = (self.programs * w.F.D * split * w.V.D, self.programs * w.F.D * split)
        parts, chunk = plan.reduce_parts(self.programs, self.o.layout.widest, config["BN"])
        summed = to
        if parts > 1:
            summed = (self.buffer(parts, sizes[0]), None if to[1] is None else self.buffer(parts, sizes[1]))
        at, a = placed(*rows)
        launch(
            kernel, self.programs * parts * split, *pointers, *summed, *at, *self.sizes(), chunk, *last, ALIGN=a,
            **{**self.token_flags(), **w._asdict(), **flags}, **config,
        )  # fmt: skip
        for part, out, size in zip(summed, to, sizes, strict=True):
            if parts > 1 and part is not None and out is not None:
                add(part, out, 1, parts, size, 8)

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
    at, a = placed(call.v)
    launch(
        blockmix_sum_values, call.bh * parts,
        call.v, call.keep, call.shares, partial, *at, call.n, call.h, call.bh, call.group, chunk,
        1.0 / call.n, ALIGN=a, V=call.w.V, BN=bn, num_warps=4, num_stages=3,
    )  # fmt: skip
    if parts > 1:
        add(partial, out, 1, parts, call.bh * call.dv, 32)


def sum_over(
    call: Call, x: Tensor, y: Tensor, to: Sums, anchor: Tensor | None = None, *, pair: bool = False, local: bool = True,
    ratio: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:  # fmt: skip
    """Sum y phi(x)' over every block, and with a vector also phi(x). pair: y has features too. local: times s. ratio:
    1 / den and d loss / d den."""
    w, norm, divided = call.w._replace(V=call.w.F) if pair else call.w, to[1] is not None, ratio[0] is not None
    digits = 3 if call.flags["EXACT"] else call.digits * (1 + pair)
    config = plan.reduce_config(w, call.q.dtype, norm, divided, digits)
    scales, scale = (call.scales, call.scale) if local else (None, 1.0)
    call.sum_rows(
        blockmix_reduce_moments, w, config, (x, y, call.keep, scales, anchor, *ratio, *call.angles), to, (x, y),
        (scale, call.sharing(x), call.sharing(y)), NORM=norm, RATIO=divided, PAIR=pair,
        ROWS=plan.rows_at_once(w, call.q.dtype, config),
    )  # fmt: skip


def local_moments(call: Call, anchor: Tensor | None, out: Moments) -> None:
    """Compute P' and z (hla2: C' and the sums of phi(q)), and the left factor R' or S of higher orders."""
    x, y = (call.q, call.k) if call.o.order == "hla2" else (call.k, call.q)
    sum_over(call, x, call.v, out[:2], anchor)
    if out.left is not None:
        sum_over(call, call.k, y, (out.left, None), pair=True)


def forward_call(call: Call, out: Tensor, buffer: Tensor) -> None:
    """Launch anchor -> reduce -> mix -> (multiply) -> read; the buffer holds the tensors for the backward."""
    saved = Saved.of(buffer, call.size)
    anchor_of(call, saved.anchor)
    local_moments(call, saved.anchor, saved.local)
    mixed_call(call, out, saved)


def mixed_call(call: Call, out: Tensor, saved: Saved) -> None:
    """Compute o from the local moments."""
    mixed(call, saved.local, saved.mixed)
    y = operator_of(call, saved.mixed)
    given = (call.q, out, saved.inverses, call.keep, saved.anchor, y.shift, *call.angles, y.matrix, y.vector)
    call.write_rows(blockmix_read_out, "read", given, (call.q, out), (call.o.eps,))


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
    room = call.moments(call.size.operators())
    shift = None if room.vector is None else call.buffer(call.programs * call.dv)
    out = Operator(room.matrix, room.vector, shift)
    product(call, blockmix_operators, call.w.V.D, x.matrix, x.vector, x.left, *out)
    return out


def product(call: Call, kernel: Any, height: int, *tensors: Tensor | None) -> None:
    """Launch a product of moments."""
    programs, common = plan.product_grid(call.w, height, call.programs)
    launch(kernel, programs, *tensors, **call.w._asdict(), PREC=call.mid, **common)


def backward_call(call: Call, g: Tensor, outs: Grads, buffer: Tensor) -> Tensor:
    """Launch the gradients of operators (with dq in first order) -> of mixed moments -> of local moments (mixing with
    m') -> of tokens; return d mixing."""
    saved, dy = Saved.of(buffer, call.size), call.moments(call.size.operators())
    operator = operator_of(call, saved.mixed)
    totals = query_call(call, g, outs[0], operator, saved, dy)
    return token_grads_call(call, g, outs, operator, saved, dy, totals)


def token_grads_call(
    call: Call, g: Tensor, outs: Grads, y: Operator, saved: Saved, d_operator: Moments, totals: Tensor | None
) -> Tensor:
    """Compute dk and dv, and dq of a higher order, from the gradients of the operators; return d mixing."""
    dk, dv = head_grads(call.q, outs[1:], call.keep)
    dx, dy, order = call.moments(call.size), d_operator, call.o.order
    if order != "la":
        dy = call.moments(call.size)
        given = (*saved.mixed, d_operator.matrix, d_operator.vector, y.shift)
        product(call, blockmix_right_grads, call.w.V.D, *given, dy.matrix, dy.vector)
        product(call, blockmix_left_grads, call.w.F.D, *given, dy.left)
    dm = mixed_back(call, dy, saved.local, dx)
    shared = (call.keep, call.scales, saved.anchor, *call.angles)
    if order != "la":
        other = call.v if order == "hla2" else call.k
        given = (g, other, outs[0], saved.inverses, totals, *shared, y.matrix, y.vector, *dx)
        call.write_rows(blockmix_query_products, "products", given, (g, other, outs[0]), (call.scale,), ORDER=order)
    q, k, v = call.q, call.k, call.v
    sources = {"la": (None, k, v), "ahla": (q, k, v), "hla2": (k, q, None)}
    left, right, _ = sources[order]
    for to in ((None, dv), (dk, None)) if order != "la" and plan.apart(call.w, call.digits) else ((dk, dv),):
        rows, last = (*sources[order], *to), (call.scale, call.sharing(left), call.sharing(right))
        name, flags = "key" if order == "la" else "products", {"BOTH": order == "hla2", "FINE": call.fine}
        call.write_rows(blockmix_token_grads, name, (*rows, *shared, *dx), rows, last, **flags)
    sum_heads((dk, dv), outs[1:])
    return dm


def query_call(call: Call, g: Tensor, to: Tensor, y: Operator, saved: Saved, dy: Moments) -> Tensor | None:
    """Compute the gradients of the operators y and, in first order, dq, in one or two passes over the tokens; return
    d loss / d den if it was computed."""
    dq, totals = to if call.o.order == "la" else None, None
    rows = (call.q, g, call.q if dq is None else dq)
    moments = (call.keep, saved.anchor, y.shift, *call.angles, y.matrix, y.vector)
    if dq is not None and plan.one_pass(call.w, call.o.normalize, call.q.dtype, call.digits):
        # a rotation of channels (i, i + D / 2) needs both halves of the channels
        w, config = plan.query_config(call.w, call.q.dtype, call.digits, call.flags["TURN"] == "halves")
        given = (call.q, g, dq, saved.inverses, None, *moments)
        call.sum_rows(blockmix_query_grads, w, config, given, dy[:2], rows, (call.o.eps,), FINE=call.fine)
        return None
    ratio: tuple = (None, None)
    if call.o.normalize:
        totals = call.buffer(call.bh, call.n)
        ratio = (saved.inverses, totals)
        given = (call.q, g, dq, *ratio, *moments, None, None)
        call.write_rows(blockmix_query_grads, "rows", given, rows, (call.o.eps,), FINE=call.fine, SPLIT=1)
    sum_over(call, call.q, g, dy[:2], local=False, ratio=ratio)
    return totals
