"""Order warm-up: higher-order mixers start as linear attention and are blended in."""

from collections.abc import Iterable

import torch
from torch import nn

from zoo.mixers import MIXERS
from zoo.mixers.hla import HigherOrder


class OrderWarmup:
    """Schedule of order warm-up. Its state depends on the step only, so that resumed runs continue exactly."""

    def __init__(
        self, models: Iterable[nn.Module], fraction: float, scale: float, last_step: int, device: torch.device
    ) -> None:
        """fraction: fraction of the `last_step` steps after which warm-up ends; 0 disables it. scale: factor on the
        first-order term.

        Raises ValueError for models without higher-order mixers.
        """
        self.layers = [m for model in models for m in model.modules() if isinstance(m, HigherOrder)] if fraction else []
        if fraction and not self.layers:
            names = ", ".join(name for name, kind in MIXERS.items() if issubclass(kind, HigherOrder))
            raise ValueError(f"optim.anneal is for models with layers of {names}, and this one has none")
        self.steps, self.scale, self.device = fraction * last_step, scale, device

    def __call__(self, step: int) -> None:
        """Set all layers to their state after `step` steps."""
        for layer in self.layers:
            layer.set_warmup(step / self.steps, self.scale, self.device)
