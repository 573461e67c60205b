"""Density of adaptive multipole attention per denoising step."""

import functools
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from diffusers import SchedulerMixin
from torch import Tensor, nn

from zoo.diffusion.samplers import Sampler
from zoo.mixers.multipole import Multipole


class DensitySchedule:
    """Context in which the adaptive `multipole` layers of some denoisers have a density that depends on the step.

    scheduler: the scheduler that samples. A call of `scheduler.step` ends a step, and a call of
    `scheduler.set_timesteps` starts again at step 0.  steps: pairs (first step, density); a density of 0 is each
    layer's own. [[0, 1.0], [2, 0]] computes the first two steps exactly.

    Raises ValueError for other pairs, and for models without such a layer.
    """

    def __init__(
        self, models: Iterable[nn.Module], scheduler: SchedulerMixin, steps: Sequence[Sequence[float]]
    ) -> None:
        self.scheduler, self.steps, self.step = scheduler, check_steps(steps), 0
        layers = [m for model in models for m in model.modules() if isinstance(m, Multipole)]
        self.layers = [(m, m.density) for m in layers if m.options.select != "near"]
        if not self.layers:
            raise ValueError("density needs layers of multipole with select='error', 'mass' or 'mean': there is none")

    def __enter__(self) -> None:
        self.begin_step(0)
        set_timesteps, step = self.scheduler.set_timesteps, self.scheduler.step

        @functools.wraps(set_timesteps)  # pipelines read its signature
        def begin(*args: Any, **kwargs: Any) -> Any:
            self.begin_step(0)
            return set_timesteps(*args, **kwargs)

        @functools.wraps(step)
        def advance(*args: Any, **kwargs: Any) -> Any:
            found = step(*args, **kwargs)
            self.begin_step(self.step + 1)
            return found

        self.scheduler.set_timesteps, self.scheduler.step = begin, advance

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self.scheduler.set_timesteps, self.scheduler.step  # the methods of its class are visible again
        for layer, own in self.layers:
            layer.density = own

    def begin_step(self, step: int) -> None:
        """Set the densities of all layers for a step."""
        self.step = step
        density = [x for first, x in self.steps if first <= step][-1]
        for layer, own in self.layers:
            layer.density = density or own


class ScheduledSampler:
    """A sampler whose calls run in a `DensitySchedule`."""

    def __init__(self, sampler: Sampler, schedule: DensitySchedule) -> None:
        self.sampler, self.schedule = sampler, schedule
        self.fps, self.column = sampler.fps, sampler.column
        self.labels, self.metadata = sampler.labels, sampler.metadata

    def __call__(self, numbers: Sequence[int]) -> Tensor:
        with self.schedule:
            return self.sampler(numbers)


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
