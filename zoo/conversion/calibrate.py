"""Calibration of the gains, coefficients and temperatures of a converted model, without gradients.

For each converted layer, a least-squares fit (`least_squares`) of the terms of its mixer (`calibration_terms`) to the
output of softmax attention determines the parameters. Inputs are the hidden states of the softmax model, so the layers
are independent of each other. A few hundred samples suffice.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.conversion.calibration_terms import MixerInput, Terms, terms_of
from zoo.conversion.hooks import Call, Inputs, TeacherStudent, layers_of, record_mixer_calls
from zoo.conversion.least_squares import NormalEquations, r_squared
from zoo.mixers import build_mixer
from zoo.mixers.taylor2 import Taylor2
from zoo.models.convert import backbone_of
from zoo.models.timm.attention import Site
from zoo.progress import progress

FP16_MAX = 65504.0  # largest float16 number


@dataclass(frozen=True)
class Calibration:
    """Calibration result of one layer.

    r2: coefficient of determination of the softmax output, over all heads.
    r2_centred: r2 after subtraction of the token mean from outputs and terms.
    heads: r2 per head.
    trial: chosen temperature, exponent or c2 per head.
    key_shift, query_shift: norm of the mean key (query), divided by the mean norm of keys (queries); near 1 if all
        tokens are similar.
    largest: largest magnitude of the softmax output.
    fp16_part: `largest` relative to the largest float16 number.
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


@torch.no_grad()
def calibrate(student: nn.Module, teacher: nn.Module, inputs: Iterable[Inputs]) -> list[Calibration]:
    """Set the gains, coefficients and temperatures of every converted layer of `student`, in place.

    student: timm or diffusers model after `zoo.convert(..., gains=True)`. teacher: the softmax model before conversion.
    inputs: batches of inputs. Raises ValueError for layers without gains, a teacher with other layers or without
    softmax, and empty inputs.
    """
    pair = TeacherStudent(teacher, student)
    _check_softmax(pair)
    terms = {name: terms_of(layer.mixer, name) for name, layer in pair.layers.items()}
    batches = list(inputs)
    if not batches:
        raise ValueError("calibration needs at least one batch of inputs")
    narrow = {n: layer for n, layer in pair.layers.items() if _has_width(layer.mixer)}
    if narrow:
        _set_projections(pair, narrow, batches)
    layers = {name: _LayerFit(name, pair.layers[name], terms[name]) for name in terms}
    for batch in progress(batches, "calibration"):
        calls = pair.calls(batch)[1]
        for name, layer in layers.items():
            layer.add(calls[name])
    return [layer.finish() for layer in layers.values()]


def _check_softmax(pair: TeacherStudent) -> None:
    backbone, layers = backbone_of(pair.teacher), layers_of(pair.teacher)
    for name in pair.layers:
        mixer = backbone.current_mixer(pair.teacher, layers[name])
        if mixer != "softmax":
            raise ValueError(f"{name} of the teacher is {mixer!r}, not softmax: calibration fits the softmax output")


class _LayerFit:
    """Normal equations and statistics of one layer, summed over batches."""

    def __init__(self, name: str, site: Site, terms: Terms) -> None:
        self.name, self.site, self.terms = name, site, terms
        self.equations: dict[float, NormalEquations] = {}
        self.shifts = torch.zeros(2, dtype=torch.float64)
        self.calls, self.groups, self.largest = 0, 1, 0.0

    def add(self, call: Call) -> None:
        tokens = tokens_of(self.name, self.site, call)
        q, k = tokens[:2]
        target = softmax_of(self.site, tokens)
        for trial in self.terms.trials:
            columns = self.terms.columns(trial, tokens)
            equations = self.equations.setdefault(trial, NormalEquations(q.shape[2], len(columns)))
            equations.add(columns, target)
        self.calls, self.groups = self.calls + 1, k.shape[2]
        self.shifts += torch.tensor([_shift(k), _shift(q)], dtype=torch.float64)
        self.largest = max(self.largest, float(target.abs().max()))

    def finish(self) -> Calibration:
        """Solve the equations, write the solution into the mixer, and return the quality of the fit."""
        trials = list(self.equations)
        weights = torch.stack([self.equations[t].solve() for t in trials])  # [T, H, K]
        errors, powers = _trial_errors(self.equations, weights, "errors")
        groups = self.groups
        best = errors.unflatten(1, (groups, -1)).sum(2).argmin(0).repeat_interleave(errors.shape[1] // groups)
        head = torch.arange(errors.shape[1])
        chosen = torch.tensor(trials, dtype=torch.float64)[best]
        gains = self.site.mixer.gains
        assert gains is not None
        device = gains.gain.device
        self.terms.write(chosen.to(device), weights[best, head].to(device))
        centred, centred_powers = _trial_errors(self.equations, weights, "centred_errors")
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
            fp16_part=self.largest / FP16_MAX,
        )


def _trial_errors(equations: dict[float, NormalEquations], weights: Tensor, which: str) -> tuple[Tensor, Tensor]:
    """Return errors and powers of all trials, [T, H] each."""
    pairs = [getattr(e, which)(w) for e, w in zip(equations.values(), weights, strict=True)]
    return torch.stack([e for e, _ in pairs]), torch.stack([p for _, p in pairs])


def tokens_of(name: str, site: Site, call: Call) -> MixerInput:
    """Return the mixer inputs (q, k, v, context) of a converted layer that is called as in `call`."""
    with record_mixer_calls({name: site}) as calls:
        call.repeat(site)
    q, k, v, ctx = calls[name].arguments
    return q, k, v, ctx


def softmax_of(site: Site, tokens: MixerInput) -> Tensor:
    """Compute softmax attention of mixer inputs, [B, N, H, D] in float32; zero at padded tokens."""
    q, k, v, ctx = tokens
    heads, width = q.shape[2:]
    mixer = build_mixer("softmax", heads * width, heads, width, num_kv_heads=k.shape[2], scale=site.mixer.scale)
    o = mixer(q, k, v, ctx).float()
    return o if ctx.key_padding_mask is None else o.where(ctx.key_padding_mask[:, :, None, None], 0)


def _shift(x: Tensor) -> float:
    """Compute |mean token| / mean |token| of [B, N, H, D], averaged over samples and heads."""
    x = x.float()
    return float((x.mean(1).norm(dim=-1) / x.norm(dim=-1).mean(1).clamp(min=1e-12)).mean())


def _has_width(mixer: nn.Module) -> bool:
    return isinstance(mixer, Taylor2) and mixer.options.width is not None


def _set_projections(pair: TeacherStudent, layers: dict[str, Site], batches: list[Inputs]) -> None:
    """Set the projections of `taylor2` layers with `width` to the best approximation of the scores q.(k - mean k).

    With second moments C_q, C_k of queries and centred keys and the truncated singular value decomposition U S V' of
    C_q^1/2 C_k^1/2, the projections are A = C_q^-1/2 U S^1/2 for q and B = C_k^-1/2 V S^1/2 for k.
    """
    sums: dict[str, list[Tensor]] = {}
    for batch in batches:
        calls = pair.calls(batch)[1]
        for name, site in layers.items():
            q, k, _, ctx = tokens_of(name, site, calls[name])
            q, k = (t if ctx.rotate is None else ctx.rotate(t) for t in (q, k))
            k = k.double() - k.double().mean(1, keepdim=True)
            q = q.double().unflatten(2, (k.shape[2], -1))  # [B, N, Hk, G, D]
            moments = [torch.einsum("bnhgd,bnhge->hde", q, q), torch.einsum("bnhd,bnhe->hde", k, k)]
            previous = sums.get(name)
            sums[name] = moments if previous is None else [a + b for a, b in zip(previous, moments, strict=True)]
    for name, site in layers.items():
        mixer = site.mixer
        assert isinstance(mixer, Taylor2) and mixer.options.width is not None
        second_q, second_k = sums[name]
        for_q, for_k = best_projections(second_q, second_k, mixer.options.width)
        mixer.narrow_q.copy_(for_q.repeat_interleave(len(mixer.narrow_q) // len(for_q), dim=0))
        mixer.narrow_k.copy_(for_k)


def best_projections(second_q: Tensor, second_k: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return A, B [H, D, R] that minimise the mean square of q A B' k - q k, for second moments [H, D, D]."""
    (root_q, back_q), (root_k, back_k) = (_roots(m) for m in (second_q, second_k))
    u, s, vh = torch.linalg.svd(root_q @ root_k)
    half = s[:, None, :rank].sqrt()
    return back_q @ (u[..., :rank] * half), back_k @ (vh.mT[..., :rank] * half)


def _roots(m: Tensor) -> tuple[Tensor, Tensor]:
    """Return M^1/2 and its inverse (pseudo-inverse if M is singular)."""
    values, vectors = torch.linalg.eigh(m)
    values = values.clamp(min=0)
    root = values.sqrt()
    back = torch.where(values > 1e-12 * values.amax(-1, keepdim=True), 1 / root, 0)
    return (vectors * root[:, None]) @ vectors.mT, (vectors * back[:, None]) @ vectors.mT
