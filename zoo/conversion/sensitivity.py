"""How much each converted layer changes the output of a model, and what keeping some of them softmax costs and gains.

Every measurement runs the softmax model itself, some of whose layers return what the converted ones return for the same
arguments (`hooks.replace_layers`): a model with those layers converted, without a copy of it.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.conversion.distill import relative_distance
from zoo.conversion.hooks import Inputs, TeacherStudent, forward, replace_layers

REPEATS = 5  # of a timing, of which the median counts


@dataclass(frozen=True)
class Sensitivity:
    """One layer: the distance of the model's output when this layer alone is converted, and its time a forward pass in
    ms, softmax and converted, on the device and inputs of the measurement."""

    layer: str
    distance: float
    softmax_ms: float
    mixer_ms: float


@dataclass(frozen=True)
class Choice:
    """A model that keeps softmax in the layers `kept`: distance of its output, part of the inputs with the same most
    likely class (classifiers), and the time of its attention layers in ms."""

    kept: list[str]
    distance: float
    agreement: float | None
    attention_ms: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Of logits [B, K] the mean KL(teacher || model) in nats, of other outputs the squared distance over the power."""
    if wanted.ndim == 2:
        p, q = F.log_softmax(wanted.float(), -1), F.log_softmax(found.float(), -1)
        return float(F.kl_div(q, p, reduction="batchmean", log_target=True))
    return float(relative_distance(found, wanted))


@torch.no_grad()
def sensitivities(
    student: Any, teacher: Any, inputs: Sequence[Inputs], timed_in: Callable[[], AbstractContextManager] = nullcontext
) -> list[Sensitivity]:
    """Each converted layer alone, in the order of the model. Raises ValueError as `TeacherStudent`.

    timed_in: the context in which the layers are timed, such as the autocast that they will run in: the distances are
        those of the weights as they are.
    """
    pair = TeacherStudent(teacher, student)
    outputs = [pair.calls(batch)[0] for batch in inputs]
    found = []
    for name, layer in pair.layers.items():
        with replace_layers(teacher, {name: layer}):
            apart = [distance(forward(teacher, x), y) for x, y in zip(inputs, outputs, strict=True)]
        call = pair.calls(inputs[0])[1][name]
        original = teacher.get_submodule(name)
        with timed_in():
            times = [1e3 * median_seconds(partial(call.repeat, m)) for m in (original, layer)]
        found.append(Sensitivity(name, sum(apart) / len(apart), times[0], times[1]))
    return found


def median_seconds(run: Callable[[], Any]) -> float:
    """Median wall time of `run` after one warm-up; on CUDA the device is waited for."""
    times = []
    for _ in range(REPEATS + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times[1:])[REPEATS // 2]


def ranking(rows: Iterable[Sensitivity]) -> list[str]:
    """The layers in the order in which softmax is worth keeping: most distance for each millisecond that converting
    saves; where converting saves no time, it costs nothing to keep softmax, so such a layer comes first."""

    def worth(row: Sensitivity) -> tuple[bool, float]:
        saved = row.softmax_ms - row.mixer_ms
        return saved <= 0, row.distance if saved <= 0 else row.distance / saved

    return [row.layer for row in sorted(rows, key=worth, reverse=True)]


def by_distance(rows: Iterable[Sensitivity]) -> list[str]:
    """The layers in the order of their distance, largest first."""
    return [row.layer for row in sorted(rows, key=lambda row: row.distance, reverse=True)]


def counts(layers: int) -> list[int]:
    """How many layers to keep: 0, 1, 2, 4, ... and all."""
    found = [0]
    while (nxt := max(1, 2 * found[-1])) < layers:
        found.append(nxt)
    return [*found, layers]


@torch.no_grad()
def choices(student: Any, teacher: Any, inputs: Sequence[Inputs], rows: Sequence[Sensitivity]) -> list[Choice]:
    """Models that keep softmax in the 0, 1, 2, 4, ... first layers of both orders, each kept set once."""
    pair = TeacherStudent(teacher, student)
    outputs = [pair.calls(batch)[0] for batch in inputs]
    times = {row.layer: row for row in rows}
    found: dict[frozenset[str], Choice] = {}
    for order in (by_distance(rows), ranking(rows)):
        for n in counts(len(order)):
            kept = frozenset(order[:n])
            if kept in found:
                continue
            with replace_layers(teacher, {k: m for k, m in pair.layers.items() if k not in kept}):
                ours = [forward(teacher, x) for x in inputs]
            ms = sum(r.softmax_ms if name in kept else r.mixer_ms for name, r in times.items())
            apart = [distance(a, b) for a, b in zip(ours, outputs, strict=True)]
            names = [name for name in times if name in kept]
            found[kept] = Choice(names, sum(apart) / len(apart), _agreement(ours, outputs), ms)
    return sorted(found.values(), key=lambda c: len(c.kept))


def _agreement(ours: list[Tensor], theirs: list[Tensor]) -> float | None:
    if theirs[0].ndim != 2:
        return None
    same = [(a.argmax(-1) == b.argmax(-1)).float().mean() for a, b in zip(ours, theirs, strict=True)]
    return float(torch.stack(same).mean())


def pareto(found: Iterable[Choice]) -> list[Choice]:
    """Those that no other one beats in both distance and time, fastest first."""
    front: list[Choice] = []
    for choice in sorted(found, key=lambda c: (c.attention_ms, c.distance)):
        if not front or choice.distance < front[-1].distance:
            front.append(choice)
    return front
