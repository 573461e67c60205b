"""Layers of higher order that begin a run as first-order attention and become themselves."""

from collections.abc import Iterable

import torch
from torch import nn

from zoo.mixers import MIXERS
from zoo.mixers.hla import HigherOrder


class OrderWarmup:
    """Called with the number of steps done, on which alone depends what it sets: a run continues as it was."""

    def __init__(
        self, models: Iterable[nn.Module], part: float, ridge: float, last_step: int, device: torch.device
    ) -> None:
        """part: of the `last_step` steps, after which layers are themselves.  ridge: lambda of `ahla` halfway.

        Raises ValueError when no layer can be annealed.
        """
        self.layers = [m for model in models for m in model.modules() if isinstance(m, HigherOrder)] if part else []
        if part and not self.layers:
            names = ", ".join(name for name, kind in MIXERS.items() if issubclass(kind, HigherOrder))
            raise ValueError(f"optim.anneal is for models with layers of {names}, and this one has none")
        self.steps, self.ridge, self.device = part * last_step, ridge, device

    def __call__(self, step: int) -> None:
        """Set the layers as they are after `step` steps."""
        for layer in self.layers:
            layer.set_warmup(step / self.steps, self.ridge, self.device)
