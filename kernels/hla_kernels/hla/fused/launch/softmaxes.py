"""Launches of `blocks.softmaxes`: a ratio of both softmaxes, D x D between the tokens as by blocks."""

from __future__ import annotations

from torch import Tensor

from ....dispatch.recording import launch
from .. import plan
from ..blocks.layout import MOMENTS, TOKENS, Place, layout
from ..blocks.softmax_grads import pair_features, pair_grads
from ..blocks.softmaxes import pair_readout, pair_tokens, pair_values
from ..plan.blocks import pair_config
from ..spec import SPLIT, split_width
from .blocks import Blocks, Planes, apart, moment_grads, operator
from .call import Call, Outs


class Softmaxes(Blocks):
    """One call."""

    exact = "ieee" if SPLIT == "ieee" else "tf32x3"

    def __init__(self, call: Call, state: Tensor):
        super().__init__(call, state)
        self.digits, self.plane = 1, call.q.dtype
        d, dv = call.q.shape[3], call.v.shape[3]
        (r1, r2), (v1, v2) = split_width(d), split_width(dv)
        self.widths = {"D": d, "R1": r1, "R2": r2, "DV": dv, "V1": v1, "V2": v2}

    def tiles(self, kernel: str, *args: int) -> dict[str, int]:
        """Return the tiles of a kernel by blocks."""
        return self.pair_tiles(kernel) if kernel == "moments" else super().tiles(kernel, *args)

    def pair_tiles(self, kernel: str) -> dict[str, int]:
        """Return the tiles of a kernel."""
        return self.call.tiles(pair_config, kernel, max(self.widths["D"], self.widths["DV"]))

    def begin(self) -> None:
        """Features of q and k, where products read them as they are."""
        self.tokens = {"v": Planes(self.call.v)}
        for source in "qk" if self.spec.op != "linear_attention" else "":
            x = self.raw[source]
            out = self.call.buffer(*x.shape[:3], self.lay.f, dtype=x.dtype)
            config = self.pair_tiles("features")
            at, units = apart(x, out)
            tiles = self.places(config["BN"])
            launch(
                pair_features, self.call.b * x.shape[2] * tiles,
                x, out, *at, self.call.n, x.shape[2], tiles, ALIGNS=units,
                **{name: self.widths[name] for name in ("D", "R1", "R2")}, **config,
            )  # fmt: skip
            self.tokens[source] = Planes(out)

    def values(self, name: str, x: Tensor, y: Tensor, scaled: bool, ridge: float = 0.0) -> None:
        """Compute the moment `name` = Sum phi(x) y'; of gradients y, over denominators."""
        call, place = self.call, self.lay.at[name]
        config = self.pair_tiles("values")
        parts, chunk = self.parts(4, config["BN"])
        at, units = apart(x, y)
        partial = call.buffer(parts, call.bh, place.rows * place.pitch)
        divided = self.ratio is not None
        launch(
            pair_values, call.bh * parts * 2,
            x, y, self.ratio, partial, *at, call.n, call.h, call.h // x.shape[2], call.h // y.shape[2], parts, chunk,
            call.bh, DIVIDED=divided, ALIGNS=units, PITCH=place.pitch, **self.widths, **config,
        )  # fmt: skip
        self.finish(partial, place, self.lay.e, scaled, ridge)

    def chunks(self, config: dict[str, int]) -> tuple[int, int]:
        """Return (parts, tokens of a part) of a pass that keeps its weights."""
        return plan.apply_parts(self.call.w, self.call.planned, self.call.most, config["BN"])

    def readout(self, out: Tensor, x: Tensor, place: Place, divide: bool) -> None:
        """Compute out = phi(x) M, over its denominators or scaled."""
        call, config = self.call, self.pair_tiles("divide" if divide else "readout")
        parts, chunk = self.chunks(config)
        at, units = apart(x, out)
        weights = self.weights[place.base]
        lengths = (self.length(place), weights.first.shape[1])
        launch(
            pair_readout, call.bh * parts,
            x, out, self.base(place), weights.first, *at, call.n, call.h, call.h // x.shape[2], parts, chunk,
            call.scale, self.spec.eps, DIVIDE=divide, ALIGNS=units, LENGTHS=lengths,
            M1=place.off + self.lay.v, OFF=place.off + lengths[1] - lengths[0], PITCH=place.pitch, **self.widths,
            **config,
        )  # fmt: skip

    def token_pass(self, x: Tensor, y: Tensor, place: Place, out: Tensor | None, ratio: Tensor | None) -> None:
        """The gradient of x of a product with values y or, with `ratio`, of the ratio whose gradient is y; fills it."""
        call, config = self.call, self.pair_tiles("tokens")
        parts, chunk = self.chunks(config)
        at, units = apart(x, y, x if out is None else out)
        weights = self.weights[place.base]
        lengths = (self.length(place), weights.first.shape[1])
        launch(
            pair_tokens, call.bh * parts,
            x, y, out, self.base(place), weights.first, ratio, *at, weights.step, call.n, call.h,
            call.h // x.shape[2], call.h // y.shape[2], parts, chunk, call.scale, self.spec.eps,
            RATIO=ratio is not None, ALIGNS=units, LENGTHS=lengths, M1=place.off + self.lay.v,
            OFF=place.off + lengths[1] - lengths[0], PITCH=place.pitch, **self.widths, **config,
        )  # fmt: skip

    def grads(
        self, x: Tensor, out: Tensor, g: Tensor | None, value: str, features: tuple[tuple[str, bool], tuple[str, bool]]
    ) -> None:
        """The gradient of q (with g) or of k: of the moment `value` with v, and of those with features of q and k."""
        call, at, moments = self.call, self.lay.at, MOMENTS[self.spec.op]
        config, spots = self.pair_tiles("grads"), self.weights[1].first.shape[1] - self.length(at["dM"])

        def spot(name: str) -> int:
            return at[name].off + spots if name.upper() in moments else -1

        fq, fk = self.tokens["q"].first, self.tokens["k"].first
        given = (x, call.v, x if g is None else g, fq, fk, out)
        steps, units = apart(*given)
        matrix, weights, m = self.weights[0], self.weights[1], at["M"]
        tiles = self.places(config["BN"])
        ones = at[value].off + self.lay.v if value.upper() in moments else -1
        launch(
            pair_grads, call.bh * tiles,
            *given, self.state if self.ratio is None else self.ratio, self.state, self.work, matrix.first,
            weights.first, *steps, (matrix.step, weights.step), call.n, call.h, call.g, call.h // x.shape[2], tiles,
            call.scale, RATIO=g is not None, VALUES=(spot(value), ones),
            FEATURES=tuple((spot(name), turned) for name, turned in features), ALIGNS=units,
            LENGTHS=(self.lay.state, self.lay.work, matrix.first.shape[1], weights.first.shape[1]),
            M1=m.off + self.lay.v, PITCH=m.pitch, WIDE=-(-self.lay.f // 16) * 16, **self.widths, **config,
        )  # fmt: skip


def pair_forward_call(call: Call, o: Tensor, saved: Tensor) -> None:
    """o; the state that the backward reads too unless `saved` is empty."""
    lay = layout(call.spec, call.q.shape[3], call.v.shape[3])
    run = Softmaxes(call, saved if saved.numel() > 0 else call.buffer(call.bh * lay.state))
    run.begin()
    for i, name in enumerate(MOMENTS[call.spec.op]):
        (x, y), ridge = TOKENS[name], call.spec.ridge if i == 0 else 0.0
        if y == "v":
            run.values(name, run.raw[x], call.v, True, ridge)
        else:
            run.moment(name, x, y, True, ridge)
    operator(run)
    run.planes(0, "M", 0)
    run.readout(o, call.q, run.lay.at["M"], True)


def pair_backward_call(call: Call, g: Tensor, outs: Outs, state: Tensor) -> None:
    """Compute dq, dk, dv (per query head), not of a mixture of orders."""
    run, ratio = Softmaxes(call, state), call.ratio()
    run.begin()
    at, op = run.lay.at, call.spec.op
    run.planes(0, "M", 1)
    run.work = call.buffer(call.bh * run.lay.work)
    first = op == "linear_attention"
    run.token_pass(call.q, g, at["M"], outs[0] if first else None, ratio)
    run.ratio = ratio
    run.values("dM", call.q, g, False)
    moment_grads(run)
    run.planes(1, "dM", 1)
    if first:
        run.token_pass(call.k, call.v, at["dM"], outs[1], None)
    else:
        run.grads(call.q, outs[0], g, "c", (("w", False), ("r", False)))
        run.grads(call.k, outs[1], None, "p", (("r", True), ("s", False)))
    x, name = (call.q, "c") if op == "hla2" else (call.k, "p")
    run.readout(outs[2], x, at[name], False)
