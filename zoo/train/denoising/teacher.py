"""The teacher of a diffusion run: its output, and what its attention layers return, block by block."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.conversion.distill import AttentionDistillation
from zoo.train.denoising.settings import TeacherSettings


class Teacher:
    """The losses that a frozen teacher adds: squared distances of outputs, of variances, and of attention outputs.

    Both models see the same x_t, t and conditions. For the distance of attention outputs see `AttentionDistillation`.
    Raises ValueError for attention without a converted layer.
    """

    def __init__(self, model: nn.Module, student: nn.Module, settings: TeacherSettings) -> None:
        self.model, self.settings = model, settings
        self.match = AttentionDistillation(student, model) if settings.attention else None

    def listen(self, which: str = "student") -> Any:
        """A context around the student's forward pass."""
        return self.match.listen(which) if self.match else nullcontext()

    def losses(self, output: Tensor, channels: int, run: Callable[[Any], Tensor]) -> dict[str, tuple[float, Tensor]]:
        """Name -> (weight, loss) for the student's output; the first `channels` of an output are noise or velocity.

        run: calls a model on the student's inputs.
        """
        with torch.no_grad(), self.listen("teacher"):
            wanted = run(self.model).float()
        output, weights = output.float(), self.settings
        found = {"distill": (weights.output, F.mse_loss(output[:, :channels], wanted[:, :channels]))}
        if output.shape[1] > channels:
            found["variance"] = weights.variance, F.mse_loss(output[:, channels:], wanted[:, channels:])
        if self.match:
            found["attention"] = weights.attention, self.match.loss()
        return {name: pair for name, pair in found.items() if pair[0]}
