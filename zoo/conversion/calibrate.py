"""Calibration: the numbers of each head of a converted model, solved for on a few hundred inputs without gradients.

For each converted layer, fed with the hidden states of the softmax model, the output of softmax attention is explained
by the terms of the mixer (`terms`) in least squares (`solve`); the solution becomes the layer's gains, coefficients and
temperature. Layers are independent of each other, since every one sees the softmax model's own hidden states.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.conversion.calibration_terms import Terms, terms_of
from zoo.conversion.hooks import Call, Inputs, TeacherStudent, layers_of, record_mixer_calls
from zoo.conversion.least_squares import NormalEquations, r_squared
from zoo.mixers import build_mixer
from zoo.mixers.taylor2 import Taylor2
from zoo.models.convert import backbone_of

FP16 = 65504.0  # the largest number of float16


@dataclass(frozen=True)
class Calibration:
    """What calibration found about one layer.

    r2: part of the power of the softmax output that the terms explain, over all heads.  r2_centred: the same of the
    tokens minus their mean, which is what mixing makes.  heads: r2 of each head.  trial: chosen temperature (or c2) of
    each.  key_shift, query_shift: norm of the mean token over the mean norm, near 1 where all tokens are alike.
    largest: largest magnitude of the mixer's output.  fp16_part: that over the largest number of float16.
    """

    layer: str
    mixer: str
    r2: float
    r2_centred: float
    heads: list[float]
    trial: list[float]
    key_shift: float
    query_shift: float
    largest: float
    fp16_part: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def calibrate(student: Any, teacher: Any, inputs: Iterable[Inputs]) -> list[Calibration]:
    """Set the gains, coefficients and temperatures of every converted layer of `student`, in place.

    student: a model after `zoo.convert(..., gains=True)`, timm or diffusers.  teacher: the softmax model that it was.
    inputs: batches, gone through once (twice where a degree-2 term has a width of its own).
    Raises ValueError for layers without gains, a teacher that is another model or not softmax, and no inputs.
    """
    pair = TeacherStudent(teacher, student)
    _check_softmax(pair)
    terms = {name: terms_of(layer.mixer, name) for name, layer in pair.layers.items()}
    batches = list(inputs)
    if not batches:
        raise ValueError("calibration needs at least one batch of inputs")
    narrow = {n: layer for n, layer in pair.layers.items() if _is_narrow(layer.mixer)}
    if narrow:
        _project(pair, narrow, batches)
    layers = {name: _Layer(name, pair.layers[name], terms[name]) for name in terms}
    for batch in batches:
        calls = pair.calls(batch)[1]
        for name, layer in layers.items():
            layer.add(calls[name])
    return [layer.finish() for layer in layers.values()]


def _check_softmax(pair: TeacherStudent) -> None:
    backbone, layers = backbone_of(pair.teacher), layers_of(pair.teacher)
    for name in pair.layers:
        present = backbone.current_mixer(pair.teacher, layers[name])
        if present != "softmax":
            raise ValueError(
                f"{name} of the teacher is {present!r}, not softmax: there is no softmax output to explain"
            )


class _Layer:
    """The sums of one layer, over batches."""

    def __init__(self, name: str, site: Any, terms: Terms) -> None:
        self.name, self.site, self.terms = name, site, terms
        self.equations: dict[float, NormalEquations] = {}
        self.shifts = torch.zeros(2, dtype=torch.float64)
        self.calls, self.groups, self.largest = 0, 1, 0.0

    def add(self, call: Call) -> None:
        tokens = tokens_of(self.name, self.site, call)
        q, k = tokens[:2]
        wanted = softmax_of(self.site, tokens)
        for trial in self.terms.trials:
            columns = self.terms.columns(trial, tokens)
            found = self.equations.setdefault(trial, NormalEquations(q.shape[2], len(columns)))
            found.add(columns, wanted)
        self.calls, self.groups = self.calls + 1, k.shape[2]
        self.shifts += torch.tensor([_shift(k), _shift(q)], dtype=torch.float64)
        self.largest = max(self.largest, float(wanted.abs().max()))

    def finish(self) -> Calibration:
        """Solve, write the solution into the mixer, and say how well it explains."""
        trials = list(self.equations)
        weights = torch.stack([self.equations[t].solve() for t in trials])  # [T, H, K]
        errors, powers = _each(self.equations, weights, "errors")
        groups = self.groups
        best = errors.unflatten(1, (groups, -1)).sum(2).argmin(0).repeat_interleave(errors.shape[1] // groups)
        head = torch.arange(errors.shape[1])
        chosen = torch.tensor(trials, dtype=torch.float64)[best]
        device = self.site.mixer.gains.gain.device
        self.terms.write(chosen.to(device), weights[best, head].to(device))
        centred, centred_powers = _each(self.equations, weights, "centred_errors")
        each = r_squared(errors[best, head], powers[best, head])
        shifts = self.shifts / self.calls
        return Calibration(
            layer=self.name,
            mixer=self.site.mixer_name,
            r2=float(r_squared(errors[best, head].sum(), powers[best, head].sum())),
            r2_centred=float(r_squared(centred[best, head].sum(), centred_powers[best, head].sum())),
            heads=[round(float(x), 6) for x in each],
            trial=[round(float(t), 6) for t in chosen],
            key_shift=float(shifts[0]),
            query_shift=float(shifts[1]),
            largest=self.largest,
            fp16_part=self.largest / FP16,
        )


def _each(equations: dict[float, NormalEquations], weights: Tensor, which: str) -> tuple[Tensor, Tensor]:
    """Errors and powers of every trial, [T, H] each."""
    found = [getattr(e, which)(w) for e, w in zip(equations.values(), weights, strict=True)]
    return torch.stack([e for e, _ in found]), torch.stack([p for _, p in found])


def tokens_of(name: str, site: Any, call: Call) -> tuple[Any, ...]:
    """(q, k, v, context) that the mixer of a converted layer gets when the layer is called as in `call`."""
    with record_mixer_calls({name: site}) as found:
        call.repeat(site)
    q, k, v, ctx = found[name].arguments
    return q, k, v, ctx


def softmax_of(site: Any, tokens: tuple[Any, ...]) -> Tensor:
    """What softmax attention makes of a mixer's tokens, [B, N, H, D] in float32; zeros at padded tokens."""
    q, k, v, ctx = tokens
    heads, width = q.shape[2:]
    mixer = build_mixer("softmax", heads * width, heads, width, num_kv_heads=k.shape[2], scale=site.mixer.scale)
    o = mixer(q, k, v, ctx).float()
    return o if ctx.key_padding_mask is None else o.where(ctx.key_padding_mask[:, :, None, None], 0)


def _shift(x: Tensor) -> float:
    """Norm of the mean token over the mean norm of the tokens, averaged over samples and heads of [B, N, H, D]."""
    x = x.float()
    return float((x.mean(1).norm(dim=-1) / x.norm(dim=-1).mean(1).clamp(min=1e-12)).mean())


def _is_narrow(mixer: Any) -> bool:
    return isinstance(mixer, Taylor2) and mixer.options.width is not None


def _project(pair: TeacherStudent, layers: dict[str, Any], batches: list[Inputs]) -> None:
    """Give the degree-2 terms with a width of their own the projections that keep most of the scores q.(k - mean k).

    With C_q and C_k the second moments of queries and centred keys, the best product of rank R is the truncated
    singular value decomposition U S V' of C_q^1/2 C_k^1/2: q A, k B with A = C_q^-1/2 U S^1/2, B = C_k^-1/2 V S^1/2.
    """
    sums: dict[str, list[Tensor]] = {}
    for batch in batches:
        calls = pair.calls(batch)[1]
        for name, site in layers.items():
            q, k, _, ctx = tokens_of(name, site, calls[name])
            q, k = (t if ctx.rotate is None else ctx.rotate(t) for t in (q, k))
            k = k.double() - k.double().mean(1, keepdim=True)
            q = q.double().unflatten(2, (k.shape[2], -1))  # [B, N, Hk, G, D]
            found = torch.einsum("bnhgd,bnhge->hde", q, q), torch.einsum("bnhd,bnhe->hde", k, k)
            before = sums.get(name)
            sums[name] = list(found) if before is None else [a + b for a, b in zip(before, found, strict=True)]
    for name, site in layers.items():
        mixer = site.mixer
        second_q, second_k = sums[name]
        for_q, for_k = best_projections(second_q, second_k, mixer.options.width)
        mixer.narrow_q.copy_(for_q.repeat_interleave(len(mixer.narrow_q) // len(for_q), dim=0))
        mixer.narrow_k.copy_(for_k)


def best_projections(second_q: Tensor, second_k: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A, B [H, D, R] with q A B' k closest to q k in the mean square, for second moments [H, D, D]."""
    (root_q, back_q), (root_k, back_k) = (_roots(m) for m in (second_q, second_k))
    u, s, vh = torch.linalg.svd(root_q @ root_k)
    half = s[:, None, :rank].sqrt()
    return back_q @ (u[..., :rank] * half), back_k @ (vh.mT[..., :rank] * half)


def _roots(m: Tensor) -> tuple[Tensor, Tensor]:
    """M^1/2 and its inverse (pseudo-inverse where M is singular)."""
    values, vectors = torch.linalg.eigh(m)
    values = values.clamp(min=0)
    root = values.sqrt()
    back = torch.where(values > 1e-12 * values.amax(-1, keepdim=True), 1 / root, 0)
    return (vectors * root[:, None]) @ vectors.mT, (vectors * back[:, None]) @ vectors.mT
