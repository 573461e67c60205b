"""Settings of sampling runs."""

from pathlib import Path
from typing import Any

from torch import Tensor

from zoo.eval.sample_settings import SampleOptions, SampleSettings
from zoo.eval.sampling import open_sampler


def settings(out, **sample):
    return SampleSettings(sample=SampleOptions(**({"steps": 3, "count": 7, "batch_size": 3} | sample)), out=str(out))


def whole_and_streamed(model: Path, base: str, options: dict[str, Any]) -> list[Tensor]:
    """The first video of a frame-causal model, generated as a whole and in pieces of two latent frames."""
    found = []
    for stream in (False, True):
        sampler = open_sampler(SampleOptions(model=str(model), base=base, stream=stream, **options), "cpu")
        sampler.chunk = 2
        found.append(sampler([0]).int())
    return found
