"""Launches of `fused.blocks`: the formulas of `hla_kernels.hla.gradient` with workspaces."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ....dispatch.recording import launch
from .. import plan
from ..blocks.features import block_planes, block_slopes, block_split, block_sums
from ..blocks.layout import MOMENTS, TOKENS, Place, features, is_centred, layout
from ..blocks.matrices import block_finish, block_mixture, block_product
from ..blocks.tokens import block_apply, block_moments, block_ratio
from ..plan.blocks import block_config
from ..spec import FEATURE_MAPS, PLANE, alignment, strides
from .call import BLOCK, Call, Outs, pad

SOURCES = "qkvg"
Pair = tuple[str, Place, bool, int, bool]  # source, weight, weight transposed, width of the source, source centred


def apart(*tensors: Tensor) -> tuple[list[tuple[int, int, int]], tuple[int, ...]]:
    """Return the strides of each tensor in units of its alignment (dtypes differ), and the alignments."""
    units = tuple(alignment(x) for x in tensors)
    return [strides(x, a) for x, a in zip(tensors, units, strict=True)], units


class Planes(NamedTuple):
    """Tokens or matrices as a sum of terms: the first term, number of terms, stride between terms as read by
    `features.offset`."""

    first: Tensor
    terms: int = 1
    step: int = 1


class Blocks:
    """Tokens and workspaces of a call, and the steps of forward and backward."""

    plane, exact = PLANE, "ieee"

    def __init__(self, call: Call, state: Tensor):
        self.call, self.spec, self.state, self.work = call, call.spec, state, state
        self.lay = layout(call.spec, call.q.shape[3], call.v.shape[3])
        # digits of products: denominators of `polynomial` and the gradient of its coefficients nearly cancel
        mixed, full = call.spec.op == "polynomial", call.q.dtype == torch.float32
        exact = 3 if call.spec.learned or (mixed and full) else 2
        self.read = exact if full else 1
        self.digits = exact if mixed else self.read
        # the common part of centred tokens cancels after `apply`
        self.added = 0 if self.read == 1 and call.spec.center is None and not call.spec.mean_path else self.read
        self.ratio: Tensor | None = None
        self.weights: dict[int, Planes] = {}
        self.raw = {"q": call.q, "k": call.k, "v": call.v}
        self.tokens: dict[str, Planes] = {}

    def begin(self) -> None:
        """Split the tokens into planes: q, k, v for moments, and r, the queries of the read-out."""
        for source, x in self.raw.items():
            self.tokens[source] = self.split(x, source != "v", centre=source)
        raw = self.spec.normalize and is_centred(self.spec, "q")
        self.tokens["r"] = self.split(self.call.q, True) if raw else self.tokens["q"]

    def tiles(self, kernel: str, *args: int) -> dict[str, int]:
        """Return the tiles of a kernel."""
        return self.call.tiles(block_config, kernel, *args)

    def places(self, bn: int) -> int:
        """Return the number of tiles of the longest sequence."""
        return -(-self.call.most // bn)

    def room(self, count: int, *shape: int) -> Planes:
        """Allocate planes, each a multiple of 16 bytes."""
        step = -(-math.prod(shape) // 8)
        room = self.call.buffer(count * step * 8, dtype=self.plane)
        return Planes(room[: math.prod(shape)].view(shape), count, 2 * step + 1)

    def split(self, x: Tensor, mapped: bool, centre: str = "", divided: bool = False) -> Planes:
        """Return the planes of phi(x) or x, minus the mean of `centre`, or of x over the denominators of a ratio; x
        itself if it is one plane."""
        call, config, spec = self.call, self.tiles("split"), self.spec
        fmap = FEATURE_MAPS[spec.feature_map] if mapped else 0
        centred = is_centred(spec, centre)
        changed = fmap > 0 or centred or divided
        if not changed and x.dtype == PLANE:
            return Planes(x)
        count = min(self.digits, 2) + 1 if changed or x.element_size() == 4 else 2
        out = self.room(count, *x.shape[:3], features(spec, x.shape[3], mapped))
        at, units = apart(x, out.first)
        tiles = self.places(config["BN"])
        sums = self.state[self.lay.at[f"sum_{centre}"].off :] if centred else self.state
        launch(
            block_split, call.b * x.shape[2] * tiles,
            x, self.ratio if divided else x, sums, out.first, *at, out.step, call.n, x.shape[2],
            call.h // x.shape[2], tiles, self.lay.state, FMAP=fmap, DIVIDED=divided, CENTRED=centred, PLANES=count,
            ALIGNS=units, D=x.shape[3], R=pad(x.shape[3]), **config,
        )  # fmt: skip
        return out

    def slopes(self, x: Tensor, df: Tensor, out: Tensor) -> None:
        """Compute out = d loss / d x from x and d loss / d phi(x)."""
        call, config = self.call, self.tiles("slopes")
        at, units = apart(x, df, out)
        tiles = self.places(config["BN"])
        launch(
            block_slopes, call.bh * tiles,
            x, df, out, *at, call.n, call.h, call.h // x.shape[2], tiles, ALIGNS=units, D=out.shape[3],
            R=pad(out.shape[3]), FMAP=FEATURE_MAPS[self.spec.feature_map], **config,
        )  # fmt: skip

    def planes(self, base: int, first: str, digits: int) -> None:
        """Compute the planes of a workspace from the matrix `first` on, for `apply` and the ratio."""
        call, place = self.call, self.lay.at[first]
        length = self.length(place) - place.off
        out, blocks = self.room(min(digits, 2) + 1, call.bh, length), -(-length // BLOCK)
        launch(
            block_planes, call.bh * blocks,
            self.base(place), out.first, out.step, self.length(place), place.off, length, blocks, PLANES=out.terms,
            WIDE=BLOCK,
        )  # fmt: skip
        self.weights[base] = out

    def parts(self, blocks: int, bn: int) -> tuple[int, int]:
        """Return (parts, tokens per part) for a number of blocks per head: eight programs per multiprocessor."""
        return plan.reduce_parts(max(1, self.call.planned * blocks // 4), self.call.most, bn)

    def finish(self, partial: Tensor, place: Place, inner: int, scaled: bool, ridge: float = 0.0) -> None:
        """Add the parts of a matrix, set its columns from `inner` on to zero, and scale it as a moment."""
        call, length = self.call, place.rows * place.pitch
        blocks = -(-length // BLOCK)
        launch(
            block_finish, call.bh * blocks,
            partial, self.base(place), call.n, partial.shape[0], call.bh, length, place.pitch, place.cols, inner,
            place.off, self.length(place), call.scale, ridge, blocks, SCALED=scaled, WIDE=BLOCK,
        )  # fmt: skip

    def base(self, place: Place) -> Tensor:
        """Return the workspace of a matrix."""
        return self.work if place.base else self.state

    def length(self, place: Place) -> int:
        """Return the length per head of the workspace of a matrix."""
        return self.lay.work if place.base else self.lay.state

    def sum(self, source: str) -> None:
        """Compute the sum of features or tokens."""
        call, x, place, config = self.call, self.raw[source], self.lay.at[f"sum_{source}"], self.tiles("sums")
        parts, chunk = self.parts(1, config["BN"])
        (at,), (unit,) = apart(x)
        partial = call.buffer(parts, call.bh, place.pitch)
        launch(
            block_sums, call.bh * parts,
            x, partial, at, call.n, call.h, call.h // x.shape[2], parts, chunk, call.bh,
            FMAP=FEATURE_MAPS[self.spec.feature_map] if source in "qk" else 0, ALIGN=unit, D=x.shape[3],
            R=pad(x.shape[3]), PITCH=place.pitch, **config,
        )  # fmt: skip
        self.finish(partial, place, place.cols, False)

    def moment(self, name: str, x: str, y: str, scaled: bool, ridge: float = 0.0) -> None:
        """Compute the matrix `name` = Sum x y' over tokens. For a ratio, y has a column of ones or of gradients of
        denominators, with which centred tokens sum to zero."""
        call, place, tx, ty = self.call, self.lay.at[name], self.tokens[x], self.tokens[y]
        divided, width = y == "g" and self.spec.normalize, ty.first.shape[3]
        ones = y in "vg" and place.cols > width and not is_centred(self.spec, x)
        sums = divided or (ones and ty.terms > 1)  # sums need registers
        config = self.tiles("moments", min(width, 64) if sums else width, self.digits)
        blocks = -(-place.rows // config["ROWS"]) * -(-width // config["COLS"])
        parts, chunk = self.parts(blocks, config["BN"])
        at, units = apart(tx.first, ty.first)
        partial = call.buffer(parts, call.bh, place.rows * place.pitch)
        launch(
            block_moments, call.bh * parts * blocks,
            tx.first, ty.first, self.ratio if divided else partial, partial, *at, tx.step, ty.step, call.n, call.h,
            call.h // tx.first.shape[2], call.h // ty.first.shape[2], parts, chunk, call.bh, ALIGNS=units,
            X=place.rows, Y=width, XP=tx.terms, YP=ty.terms, ONES=ones, DIVIDED=divided, PITCH=place.pitch,
            DIGITS=self.digits, **config,
        )  # fmt: skip
        self.finish(partial, place, width + int(ones), scaled, ridge)

    def product(
        self, out: str, a: str, b: str, add: str | None = None, ca: int = -1, cx: int = -1, turn: str = ""
    ) -> None:
        """Compute out = c[ca] A B + c[cx] X; "a" or "b" in `turn`: A or B is transposed."""
        call, at = self.call, self.lay.at
        pa, pb, po, px = at[a], at[b], at[out], at[add or out]
        rows, inner = (pa.cols, pa.rows) if "a" in turn else (pa.rows, pa.cols)
        cols = pb.rows if "b" in turn else pb.cols
        given: list[int] = []
        for place in (pa, pb, px, po):
            given += [place.off // 16, place.pitch // 16, self.length(place) // 16]
        coefficients = self.state if call.coefficients is None else call.coefficients
        config = self.tiles("product")
        launch(
            block_product, call.bh * -(-rows // config["ROWS"]) * -(-cols // config["COLS"]),
            self.base(pa), self.base(pb), self.base(px), self.base(po), coefficients, call.h, *given, rows, inner,
            cols, ca, cx, 0.0 if add is None else 1.0, TURN_A="a" in turn, TURN_B="b" in turn, PREC=self.exact,
            **config,
        )  # fmt: skip

    def apply(
        self, out: Tensor, scaled: list[Pair], pairs: list[Pair], row: str | None = None, divide: bool = False
    ) -> None:
        """Compute out = s Sum source weight + Sum source weight + row / n, divided by q.m1 + eps."""
        call, at, lay = self.call, self.lay.at, self.lay
        tokens = [self.tokens[x if x in self.tokens else "v"] for x in SOURCES]
        if "g" not in self.tokens:  # forward
            tokens[0] = self.tokens["r"]
        steps_of, units = apart(*(x.first for x in tokens), out)
        lengths = [self.weights[i].first.shape[1] if i in self.weights else 0 for i in (0, 1)]
        numbers: list[int] = []
        for source, place, turned, width, centred in (*scaled, *pairs):
            off = place.off + lengths[place.base] - self.length(place)
            steps = (1, place.pitch) if turned else (place.pitch, 1)
            numbers += [SOURCES.index(source), place.base, off, *steps, width, int(centred)]
        # a tile that the denominator reads too must not be overwritten early, see `loops.settle`
        digits = max(self.added, 1) if divide else self.added
        config = self.tiles("apply", out.shape[3], digits)
        tiles, m = self.places(config["BN"]), at["M"]
        matrix = self.weights[0]
        weights = self.weights.get(1, matrix)
        launch(
            block_apply, call.bh * tiles * -(-out.shape[3] // config["COLS"]),
            out, *(x.first for x in tokens), self.state, self.work, matrix.first, weights.first,
            self.state if self.ratio is None else self.ratio, steps_of[4], *steps_of[:4],
            tuple(x.step for x in (*tokens, matrix, weights)), call.n, call.h, call.g, tiles, call.scale, self.spec.eps,
            PAIRS=tuple(numbers), COUNT=len(numbers) // 7, SCALED=len(scaled),
            MEANS=tuple(at[f"sum_{x}"].off for x in SOURCES),
            ROW=(-1, 0) if row is None else (at[row].base, at[row].off), DIVIDED=self.ratio is not None,
            M1=(m.off + lay.v, m.pitch) if divide else (-1, 0), ALIGNS=units, TP=tuple(x.terms for x in tokens),
            F=lay.f, DV=lay.v, OUT=out.shape[3], LENGTHS=(lay.state, lay.work, *lengths), MP=min(self.read, 2) + 1,
            DIGITS=digits, **config,
        )  # fmt: skip


def block_forward_call(call: Call, o: Tensor, saved: Tensor) -> None:
    """Compute o, and store the state for the backward unless `saved` is empty."""
    spec, lay = call.spec, layout(call.spec, call.q.shape[3], call.v.shape[3])
    run = Blocks(call, saved if saved.numel() > 0 else call.buffer(call.bh * lay.state))
    if spec.center is not None or spec.mean_path:
        for source in "qkv":
            run.sum(source)
    run.begin()
    for i, name in enumerate(MOMENTS[spec.op]):
        run.moment(name, *TOKENS[name], True, spec.ridge if i == 0 else 0.0)
    operator(run)
    run.planes(0, "M", run.read)
    run.apply(o, [], [("q", lay.at["M"], False, lay.f, False)], "sum_v" if spec.mean_path else None, spec.normalize)


def operator(run: Blocks) -> None:
    """Compute M from the moments; for first order M is P."""
    op = run.spec.op
    if op == "hla2":
        run.product("M", "S", "C")
    elif op == "ahla":
        run.product("M", "R", "P")
    elif op == "hla3":
        run.product("U", "W", "P")
        run.product("M", "S", "U")
    elif op == "polynomial":
        run.product("U", "W", "P", "C", 3, 1)
        run.product("X", "R", "P", "P", 2, 0)
        run.product("M", "S", "U", "X")


def block_backward_call(call: Call, g: Tensor, outs: Outs, saved: Tensor) -> Tensor | None:
    """Compute dq, dk, dv (per query head) and return parts [B, H, ., 4] of d coefficients."""
    run = Blocks(call, saved)
    spec = call.spec
    run.begin()
    run.planes(0, "M", run.digits if spec.normalize else run.read)
    run.work = call.buffer(call.bh * run.lay.work)
    if spec.normalize:
        _divide(run, g)
    run.raw["g"] = g
    run.tokens["g"] = run.split(g, False, divided=spec.normalize)
    if spec.center is not None or spec.mean_path:
        run.sum("g")
    run.moment("dM", "r", "g", False)
    dc = moment_grads(run)
    run.planes(1, "dM", run.read)
    _token_grads(run, outs)
    return dc


def _divide(run: Blocks, g: Tensor) -> None:
    """Compute 1 / den and d loss / d den of every query."""
    call, lay, q = run.call, run.lay, run.tokens["r"]
    ratio = call.ratio()
    assert ratio is not None
    config, m, matrix = run.tiles("ratio", lay.v, run.digits), lay.at["M"], run.weights[0]
    at, units = apart(q.first, g)
    tiles = run.places(config["BN"])
    launch(
        block_ratio, call.bh * tiles,
        q.first, g, run.state, matrix.first, ratio, *at, q.step, matrix.step, call.n, call.h, tiles, call.spec.eps,
        lay.state, matrix.first.shape[1], ALIGNS=units, QP=q.terms, MP=matrix.terms, F=lay.f, DV=lay.v, M=m.off,
        PITCH=m.pitch, DIGITS=run.digits, **config,
    )  # fmt: skip
    run.ratio = ratio


def moment_grads(run: Blocks) -> Tensor | None:
    """Compute the gradients of the moments (S and W: of both factors), and return parts of d coefficients."""
    op = run.spec.op
    if op == "hla2":
        run.product("c", "S", "dM")
        _both(run, "s", "dM", "C")
    elif op == "ahla":
        run.product("p", "R", "dM", turn="a")
        run.product("r", "dM", "P", turn="b")
    elif op != "linear_attention":
        run.product("SG", "S", "dM")
        run.product("p" if op == "hla3" else "WSG", "W", "SG")
        _both(run, "s", "dM", "U")
        _both(run, "w", "SG", "P", 3 if op == "polynomial" else -1)
    return _mixture(run) if op == "polynomial" else None


def _both(run: Blocks, out: str, a: str, b: str, c: int = -1) -> None:
    """Compute out = c (A B' + B A')."""
    run.product(out, a, b, ca=c, turn="b")
    run.product(out, b, a, out, ca=c, turn="b")


def _mixture(run: Blocks) -> Tensor | None:
    """Compute dR, dP and dC, and return parts of d coefficients unless they are fixed."""
    call, lay, at = run.call, run.lay, run.lay.at
    run.product("RG", "R", "dM", turn="a")
    run.product("r", "dM", "P", ca=2, turn="b")
    length = at["P"].rows * at["P"].pitch
    blocks = -(-length // BLOCK)
    dc = call.buffer(call.b, call.h, blocks, 4) if run.spec.learned else None
    places = {"P": "P", "C": "C", "G": "dM", "SG": "SG", "RG": "RG", "WSG": "WSG", "DP": "p", "DC": "c"}
    launch(
        block_mixture, call.bh * blocks,
        run.state, run.work, call.coefficients, dc, call.h, K=lay.state, KW=lay.work, E=lay.e, PITCH=at["P"].pitch,
        LENGTH=length, WIDE=BLOCK, **{name: at[matrix].off for name, matrix in places.items()},
    )  # fmt: skip
    return dc


def _token_grads(run: Blocks, outs: Outs) -> None:
    """Compute dq, dk, dv from the gradients of the operator and of its moments. Gradients of centred tokens are centred
    too, unless their sources already are."""
    call, lay, at, spec = run.call, run.lay, run.lay.at, run.spec

    def pair(target: str, source: str, name: str, turned: bool = False) -> list[Pair]:
        if name.upper() not in MOMENTS[spec.op]:
            return []
        ones = source == "v" and lay.e > lay.v and not is_centred(spec, target)
        width = lay.f if source in "qk" else lay.v + int(ones)
        return [(source, at[name], turned, width, is_centred(spec, target) and not is_centred(spec, source))]

    readout: Pair = ("g", at["M"], True, lay.e, is_centred(spec, "q") and not spec.normalize)
    given = {
        "q": [*pair("q", "v", "c", True), *pair("q", "k", "r"), *pair("q", "q", "w")],
        "k": [*pair("k", "v", "p", True), *pair("k", "k", "s"), *pair("k", "q", "r", True)],
        "v": [*pair("v", "k", "p"), *pair("v", "q", "c")],
    }
    mapped = spec.feature_map not in (None, "identity")
    for (name, pairs), out in zip(given.items(), outs, strict=True):
        to = call.buffer(*out.shape[:3], lay.f) if mapped and name != "v" else out
        run.apply(to, pairs, [readout] if name == "q" else [], "sum_g" if name == "v" and spec.mean_path else None)
        if to is not out:
            run.slopes(run.raw[name], to, out)
