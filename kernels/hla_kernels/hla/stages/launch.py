"""Launches of the causal kernels: sums of terms (x, y, z), and the gradient of the decay.

With w_ij the product of the weight of z_j in o_i and the gradient of o_i, d loss / d log g = Sum (i - j) w_ij, where i
and j count tokens, or frames if there are any. Pairs in one chunk of causal tokens are summed as they are. For others
Sum_i i (Sum_j w_ij) - Sum_j j (Sum_i w_ij) is used: the row sums are q_i.dq_i and the column sums k_j.dk_j, of the
parts of dq and dk that come from states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...dispatch.recording import launch
from .kernels import causal_carry, causal_outputs, causal_states
from .plan import CHUNK, REST, in_tf32, plan, tile_of, together, warps


class Tokens(NamedTuple):
    """Tokens x [B, N, H or Hk, D], with an extra float32 channel [B, N, H or Hk] and the rounding error of x, or
    None."""

    x: Tensor
    extra: Tensor | None = None
    rest: Tensor | None = None


Term = tuple[Tokens, Tokens, Tokens]


class Held(NamedTuple):
    """States [B H, segments, rows, columns] of Sum y_j z_j', or if transposed of Sum z_j y_j'; None: zero."""

    states: Tensor | None
    rows: int
    columns: int
    transposed: bool = False

    @property
    def distances(self) -> tuple[int, int]:
        """Numbers between rows and between columns of Sum y_j z_j'."""
        return (1, self.columns) if self.transposed else (self.columns, 1)


class Sums:
    """Numbers for the gradient of the log-decay, collected from the launches of a backward."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def add(self, found: Tensor, tokens: int, reverse: bool) -> None:
        """Add SUMS [B, H, segments, blocks, 3] of a launch with segments of `tokens`, 0 for frames."""
        total = found.double().sum(3)
        start = torch.arange(total.shape[2], device=total.device, dtype=torch.float64) * (tokens or 1)
        moment = total[..., 0] * start + (total[..., 1] if tokens else 0)
        self.parts.append(((-moment if reverse else moment) + total[..., 2]).sum((0, 2)))

    def add_states(self, state: Tensor, grad: Tensor, i: int) -> None:
        """Add the part of a state [B, H, ..] before the tokens (i = -1), or after them (the last i)."""
        part = (state.double() * grad.double()).flatten(2).sum((0, 2))
        self.parts.append(part if i < 0 else i * part)

    def total(self) -> Tensor:
        """Return the gradient of the log-decay, float64 [H]."""
        return torch.stack(self.parts).sum(0)


class Pass:
    """Launches on the tokens of one call with H query heads; log2: log2 of the decay per query head, float32 [H], or
    None; within: the same between tokens of a segment; exact: round neither states nor tokens times decays in them;
    frame: tokens per frame, 0 for causal tokens; sums: for the gradient of the decay, or None."""

    def __init__(self, heads: int, log2: Tensor | None, within: Tensor | None, scale: float, frame: int) -> None:
        self.heads, self.log2, self.within, self.scale, self.frame = heads, log2, within, scale, frame
        self.exact = log2 is not None
        self.sums: Sums | None = None
        self.entered: list[tuple[tuple, Tokens, Tokens, Held]] = []  # direction and segments, y, z, their states

    def run(
        self, *terms: Term, reverse: bool = False, extra: bool = False, eps: float | None = None,
        dtype: torch.dtype | None = None, partner: Tensor | None = None, counted: int = 3, pairs: bool = False,
        first: Sequence[Tensor] | None = None, last: list[Tensor] | None = None, inner: bool = False,
    ) -> Tokens:  # fmt: skip
        """Return the sum of the terms, [B, N, H, Dz] with Dz channels of z, in `dtype` or else the dtype of z.

        extra: also its extra channel. eps: divide by the extra channel plus eps, and return that divisor as extra
        channel. For the gradient of the decay: partner p, of the first `counted` terms, and whether `pairs` of one
        chunk are summed. first: the states before the sums, a contiguous one per term; last: receives those after them,
        [B, H, D, Dz] with a column for the extra channel of z, or a row for the one of y. inner: the sum is a later
        operand.
        """
        widest = max(t.x.shape[3] for term in terms for t in term)
        more = any(t.extra is not None for term in terms for t in term)
        most = together(widest, not self.exact and not more and not in_tf32(terms[0][2].x.dtype))
        out = None
        for i in range(0, len(terms), most):
            some, ends = terms[i : i + most], i + most >= len(terms)
            kind = (dtype or some[0][2].x.dtype) if ends else torch.float32
            beside = partner if self.sums is not None and i < counted else None
            states = None if first is None else first[i : i + most]
            out = self._outputs(some, out, reverse, extra, eps, kind, beside, pairs, states, last, inner)
        assert out is not None
        return out

    def _outputs(
        self, terms: Sequence[Term], before: Tokens | None, reverse: bool, extra: bool, eps: float | None,
        dtype: torch.dtype, partner: Tensor | None, pairs: bool, first: Sequence[Tensor] | None,
        last: list[Tensor] | None, inner: bool,
    ) -> Tokens:  # fmt: skip
        """Return the sum of terms of one launch, added to `before`."""
        z = terms[0][2].x
        b, n, _, width = z.shape
        tokens: list[Tokens] = []
        index = [tuple(_place(tokens, t[i]) for t in terms) for i in range(3)]
        at = tuple(x for t in tokens for x in self._at(t.x))
        out = torch.empty((b, n, self.heads, width), dtype=dtype, device=z.device)
        out_extra = torch.empty((b, n, self.heads), dtype=torch.float32, device=z.device) if extra else None
        rest = None if eps is None else torch.empty_like(out, dtype=REST)
        exact = in_tf32(z.dtype) and self.exact
        widths = tuple(x.x.shape[3] for x, _, _ in terms)
        block, *tiles = (tile_of(w, width, *widths) for w in (width, *widths))
        p = plan(b * self.heads, n, width, block, self.frame, exact)
        scored = tuple(x.extra is not None and y.extra is not None for x, y, _ in terms)
        valued = tuple(extra and z.extra is not None for _, _, z in terms)
        given = tuple(t.x for t in tokens), tuple(t.extra for t in tokens)
        sizes = (n, self.heads, p.segments, p.tokens)
        shapes = [(w + s, width + e) for w, s, e in zip(widths, scored, valued, strict=True)]
        before_all = [None] * len(terms) if first is None else first
        held = [Held(x, *shape) for x, shape in zip(before_all, shapes, strict=True)]
        if p.segments > 1 or self.frame:
            held = [
                self._entering(given, at, sizes, index[1][m], index[2][m], t, shapes[m], before_all[m], reverse)
                for m, t in enumerate(terms)
            ]
        after = None
        if last is not None:
            after = tuple(torch.empty((b, self.heads, *x), dtype=torch.float32, device=z.device) for x in shapes)
            last += after
        found = None
        if partner is not None:
            found = torch.empty((b, self.heads, p.segments, p.blocks, 3), dtype=torch.float32, device=z.device)
        tf32 = in_tf32(z.dtype)
        many = exact or (partner is not None and (pairs or reverse))
        launch(
            causal_outputs, (b * self.heads * p.segments, p.blocks),
            *given, None if held[0].states is None else tuple(x.states for x in held), after, self.within,
            None if before is None else before.x, out, out_extra, rest, partner, found, at,
            None if partner is None else self._at(partner), sizes, self.scale, eps or 0.0, X=index[0], Y=index[1],
            Z=index[2], WIDTHS=widths, SIZES=tuple(x * y for x, y in shapes),
            HELD=tuple((x.rows * x.columns, *x.distances) for x in held), WZ=width, XP=tuple(tiles),
            BZ=p.block, C=CHUNK, SCORED=scored, VALUED=any(valued),
            DIVIDED=eps is not None, REVERSE=reverse, FRAME=self.frame > 0,
            INTRA=pairs and partner is not None and not self.frame, INNER=inner, EXACT=self.exact, TF32=tf32,
            **warps(max(width, *widths), many, 1 if tf32 else 2),
        )  # fmt: skip
        if found is not None and self.sums is not None:
            self.sums.add(found, 0 if self.frame else p.tokens, reverse)
        return Tokens(out, out_extra, rest)

    def _at(self, x: Tensor) -> tuple[int, ...]:
        """Return the strides in units of 8 channels, and the number of query heads per head."""
        return (*(n // 8 for n in x.stride()[:3]), self.heads // x.shape[2])

    def _entering(
        self, given: tuple, at: tuple[int, ...], sizes: tuple[int, ...], y: int, z: int, term: Term,
        shape: tuple[int, int], first: Tensor | None, reverse: bool,
    ) -> Held:  # fmt: skip
        """Return the states of `shape` that enter the segments, an earlier launch's or its transpose if it has them."""
        segments, frame, key = sizes[2], self.frame > 0, (reverse, *sizes[2:])
        for other, own_y, own_z, x in self.entered:
            for (first_of, second_of), (rows, columns) in ((term[1:], shape), (term[:0:-1], shape[::-1])):
                same = other == key and own_y is first_of and own_z is second_of
                if same and x.rows >= rows and x.columns >= columns:
                    return x._replace(transposed=first_of is not term[1])
        wy, wz = term[1].x.shape[3], term[2].x.shape[3]
        size, scored, valued = shape[0] * shape[1], shape[0] > wy, shape[1] > wz
        bh, block = term[0].x.shape[0] * self.heads, min(64, tile_of(wz, wy))
        found = torch.empty((bh, segments, size), dtype=torch.float32, device=term[0].x.device)
        launch(
            causal_states, (bh * (segments if frame else segments - 1), -(-wz // block)),
            *given, self.within, found, at, sizes, Y=y, Z=z, WY=wy, WZ=wz, YP=tile_of(wy, wz), BZ=block, C=CHUNK,
            SIZE=size, SCORED=scored, VALUED=valued, REVERSE=reverse, FRAME=frame, EXACT=self.exact and not frame,
            TF32=in_tf32(term[0].x.dtype), **warps(max(wy, wz), False, 2),
        )  # fmt: skip
        launch(
            causal_carry, (bh, triton.cdiv(size, 1024)),
            self.log2, found, first, sizes, SIZE=size, REVERSE=reverse, FRAME=frame, BS=1024, num_warps=4,
        )  # fmt: skip
        self.entered.append((key, *term[1:], Held(found, *shape)))
        return self.entered[-1][3]


def _place(tokens: list[Tokens], t: Tokens) -> int:
    """Return the index of t among the tokens, adding it if it is new."""
    for i, other in enumerate(tokens):
        if other.x is t.x and other.extra is t.extra:
            return i
    tokens.append(t)
    return len(tokens) - 1


def gradient_of_decay(sums: Sums, gamma: Tensor, group: int) -> Tensor:
    """Return the gradient of gamma [1, Hk or 1, G or 1, 1, 1]."""
    found = sums.total().unflatten(0, (-1, group))[None, :, :, None, None]
    return (found.sum_to_size(gamma.shape) / gamma.double()).to(gamma.dtype)
