"""Sensitivity of the model output to each converted layer, and the choice of layers that keep softmax.

Measurements run the softmax model with some layers replaced by converted ones (`hooks.replace_layers`), which equals a
model with those layers converted.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.conversion.distill import relative_distance
from zoo.conversion.hooks import Inputs, TeacherStudent, forward, replace_layers
from zoo.progress import progress

REPEATS = 5  # timed repetitions; the median is used


@dataclass(frozen=True)
class Sensitivity:
    """Measurement of one layer.

    distance: output distance to the softmax model if only this layer is converted. softmax_ms, mixer_ms: times of the
    layer in ms per forward pass.
    """

    layer: str
    distance: float
    softmax_ms: float
    mixer_ms: float


@dataclass(frozen=True)
class Choice:
    """Measurement of the model that keeps softmax in the layers `kept`.

    distance: output distance to the softmax model. agreement: fraction of inputs for which both predict the same class;
    None for models other than classifiers. attention_ms: total time of the attention layers in ms.
    """

    kept: list[str]
    distance: float
    agreement: float | None
    attention_ms: float


def output_distance(output: Tensor, target: Tensor) -> float:
    """Compute the mean KL(target || output) in nats for logits [B, K], and the relative MSE for other outputs."""
    if target.ndim == 2:
        p, q = F.log_softmax(target.float(), -1), F.log_softmax(output.float(), -1)
        return float(F.kl_div(q, p, reduction="batchmean", log_target=True))
    return float(relative_distance(output, target))


@torch.no_grad()
def sensitivities(
    student: nn.Module,
    teacher: nn.Module,
    inputs: Sequence[Inputs],
    timed_in: Callable[[], AbstractContextManager] = nullcontext,
) -> list[Sensitivity]:
    """Measure the sensitivity of each converted layer, in the order of the model.

    timed_in: context of the timings, such as autocast; distances are measured without it. Raises ValueError like
    `TeacherStudent`, and for a converted layer that makes outputs infinite or NaN.
    """
    pair = TeacherStudent(teacher, student)
    outputs = [pair.calls(batch)[0] for batch in inputs]
    rows = []
    for name, layer in progress(pair.layers.items(), "sensitivity of layers", len(pair.layers)):
        with replace_layers(teacher, {name: layer}):
            distances = [output_distance(forward(teacher, x), y) for x, y in zip(inputs, outputs, strict=True)]
        distance = sum(distances) / len(distances)
        if not math.isfinite(distance):
            raise ValueError(f"the model with only {name!r} converted has outputs that are not finite; use float32")
        call = pair.calls(inputs[0])[1][name]
        original = teacher.get_submodule(name)
        with timed_in():
            times = [1e3 * median_seconds(partial(call.repeat, m)) for m in (original, layer)]
        rows.append(Sensitivity(name, distance, times[0], times[1]))
    return rows


def median_seconds(run: Callable[[], object]) -> float:
    """Return the median wall time of `run` in seconds after one warm-up, with CUDA synchronisation."""
    times = []
    for _ in range(REPEATS + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[REPEATS // 2]


def ranking(rows: Iterable[Sensitivity]) -> list[str]:
    """Sort layers by output distance per millisecond saved by conversion, largest first.

    Layers whose conversion saves no time come first: keeping softmax there costs nothing.
    """

    def benefit(row: Sensitivity) -> tuple[bool, float]:
        saved = row.softmax_ms - row.mixer_ms
        return saved <= 0, row.distance if saved <= 0 else row.distance / saved

    return [row.layer for row in sorted(rows, key=benefit, reverse=True)]


def by_distance(rows: Iterable[Sensitivity]) -> list[str]:
    """Sort layers by output distance, largest first."""
    return [row.layer for row in sorted(rows, key=lambda row: row.distance, reverse=True)]


def densities(rows: Sequence[Sensitivity], mean: float) -> list[float]:
    """Return the fraction of exact key tiles of each layer: in proportion to the root of its distance, at most 1.

    mean: of all layers. The sum of distances is least if each halves when its density doubles, as measured. Distances
    below a hundredth of the largest count as a hundredth.
    """
    least = max(row.distance for row in rows) / 100 or 1.0
    roots = [max(row.distance, least) ** 0.5 for row in rows]
    exact: set[int] = set()  # layers whose density is 1
    for _ in roots:
        rest = sum(root for i, root in enumerate(roots) if i not in exact) or 1.0
        share = (mean * len(roots) - len(exact)) / rest
        exact |= {i for i, root in enumerate(roots) if share * root >= 1}
    return [1.0 if i in exact else round(share * root, 4) for i, root in enumerate(roots)]


def counts(layers: int) -> list[int]:
    """Return the numbers of softmax layers to try: 0, 1, 2, 4, ... and all."""
    numbers = [0]
    while (doubled := max(1, 2 * numbers[-1])) < layers:
        numbers.append(doubled)
    return [*numbers, layers]


@torch.no_grad()
def choices(
    student: nn.Module, teacher: nn.Module, inputs: Sequence[Inputs], rows: Sequence[Sensitivity]
) -> list[Choice]:
    """Measure models that keep softmax in the first 0, 1, 2, 4, ... layers, in the orders of `by_distance` and
    `ranking`."""
    pair = TeacherStudent(teacher, student)
    outputs = [pair.calls(batch)[0] for batch in inputs]
    times = {row.layer: row for row in rows}
    orders, found = (by_distance(rows), ranking(rows)), []
    candidates = dict.fromkeys(frozenset(order[:n]) for order in orders for n in counts(len(order)))
    for kept in progress(candidates, "choices of softmax layers"):
        with replace_layers(teacher, {k: m for k, m in pair.layers.items() if k not in kept}):
            ours = [forward(teacher, x) for x in inputs]
        ms = sum(r.softmax_ms if name in kept else r.mixer_ms for name, r in times.items())
        distances = [output_distance(a, b) for a, b in zip(ours, outputs, strict=True)]
        names = [name for name in times if name in kept]
        found.append(Choice(names, sum(distances) / len(distances), _agreement(ours, outputs), ms))
    return sorted(found, key=lambda c: len(c.kept))


def _agreement(ours: list[Tensor], theirs: list[Tensor]) -> float | None:
    if theirs[0].ndim != 2:
        return None
    same = [(a.argmax(-1) == b.argmax(-1)).float().mean() for a, b in zip(ours, theirs, strict=True)]
    return float(torch.stack(same).mean())


def pareto(candidates: Iterable[Choice]) -> list[Choice]:
    """Return the Pareto front in distance and time, fastest first."""
    front: list[Choice] = []
    for choice in sorted(candidates, key=lambda c: (c.attention_ms, c.distance)):
        if not front or choice.distance < front[-1].distance:
            front.append(choice)
    return front
