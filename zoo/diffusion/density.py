"""Density of adaptive multipole attention per denoising step."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from zoo.mixers.multipole import Multipole


def schedule_density(models: Iterable[nn.Module], steps: Sequence[Sequence[float]]) -> "DensitySchedule":
    """Set the density of all adaptive `multipole` layers of some denoisers by the denoising step, in place.

    steps: pairs (first step, density); a density of 0 is each layer's own. [[0, 1.0], [2, 0]] computes the first two
    steps exactly. Raises ValueError for other pairs, and for models without such a layer.
    """
    return DensitySchedule(list(models), steps)


class DensitySchedule:
    """Forward hook of denoisers; see `schedule_density`. A step ends when the argument `timestep` decreases, and the
    sampling of a batch when it increases."""

    def __init__(self, models: Sequence[nn.Module], steps: Sequence[Sequence[float]]) -> None:
        self.steps = check_steps(steps)
        layers = [m for model in models for m in model.modules() if isinstance(m, Multipole)]
        self.layers = [(m, m.density) for m in layers if m.options.select != "near"]
        if not self.layers:
            raise ValueError("density needs layers of multipole with select='error', 'mass' or 'mean': there is none")
        self.step, self.time = 0, float("inf")
        for model in models:
            model.register_forward_pre_hook(self.before, with_kwargs=True)

    def before(self, model: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """Set the densities before a call of a denoiser."""
        time = float(torch.as_tensor(given["timestep"]).max())
        self.step = 0 if time > self.time or self.time == float("inf") else self.step + (time < self.time)
        self.time = time
        density = [x for first, x in self.steps if first <= self.step][-1]
        for layer, own in self.layers:
            layer.density = density or own


def check_steps(steps: Sequence[Sequence[float]]) -> list[tuple[int, float]]:
    """Return the pairs (first step, density). Raises ValueError unless steps begin at 0 and increase."""
    found = [tuple(pair) for pair in steps]
    firsts = [pair[0] for pair in found]
    pairs = all(len(pair) == 2 and pair[0] == int(pair[0]) and 0 <= pair[1] <= 1 for pair in found)
    if not found or not pairs or firsts[0] != 0 or firsts != sorted(set(firsts)):
        raise ValueError(
            "density is pairs (first step, density from 0 to 1) with increasing steps from 0, such as "
            f"[[0, 1.0], [2, 0.125]], got {steps!r}"
        )
    return [(int(first), float(density)) for first, density in found]
