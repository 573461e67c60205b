"""The teacher of a diffusion run: its output, and what its attention layers return, block by block."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.train.diffusion.model import attention_layers
from zoo.train.diffusion.settings import TeacherSettings


class Tap:
    """What the attention layers of a model returned in the last forward pass in which the tap was open, in order."""

    def __init__(self, model: Any, names: list[str]) -> None:
        self.open, self.found = False, {}  # type: ignore[var-annotated]
        layers = attention_layers(model)
        for name in names:
            layers[name].register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.open:  # closed while checkpointing recomputes
                self.found[name] = output

        return note

    def __enter__(self) -> "Tap":
        self.open, self.found = True, {}
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False


class Teacher:
    """The losses that a frozen teacher adds: squared distances of outputs, of variances, and of attention outputs.

    Both models see the same x_t, t and conditions. A distance of attention outputs is over their mean square, so that 1
    is as bad as no output; converted layers count, and of joint attention the image tokens. Raises ValueError for
    attention without a converted layer.
    """

    def __init__(self, model: nn.Module, student: nn.Module, settings: TeacherSettings) -> None:
        self.model, self.settings = model.eval().requires_grad_(False), settings
        self.taps: tuple[Tap, Tap] | None = None
        if settings.attention:
            layers = attention_layers(student)
            names = [n for n, m in layers.items() if getattr(m, "mixer_name", "softmax") != "softmax"]
            if not names:
                raise ValueError("distill.attention compares converted layers, and the model has none: set model.mixer")
            self.taps = Tap(student, names), Tap(model, names)

    def listen(self) -> Any:
        """A context around the student's forward pass."""
        return self.taps[0] if self.taps else torch.enable_grad()

    def losses(self, output: Tensor, channels: int, run: Callable[[Any], Tensor]) -> dict[str, tuple[float, Tensor]]:
        """Name -> (weight, loss) for the student's output; the first `channels` of an output are noise or velocity.

        run: calls a model on the student's inputs.
        """
        with torch.no_grad(), self.taps[1] if self.taps else torch.no_grad():
            wanted = run(self.model).float()
        output, weights = output.float(), self.settings
        found = {"distill": (weights.output, F.mse_loss(output[:, :channels], wanted[:, :channels]))}
        if output.shape[1] > channels:
            found["variance"] = weights.variance, F.mse_loss(output[:, channels:], wanted[:, channels:])
        if self.taps:
            found["attention"] = weights.attention, self._attention(*(tap.found for tap in self.taps))
        return {name: pair for name, pair in found.items() if pair[0]}

    def _attention(self, ours: dict[str, Any], theirs: dict[str, Any]) -> Tensor:
        each = [relative_distance(a, b) for name in theirs for a, b in _streams(ours[name], theirs[name])]
        return torch.stack(each).mean()


def relative_distance(found: Tensor, wanted: Tensor) -> Tensor:
    """Mean square of the difference over the mean square of `wanted`, in float32."""
    return F.mse_loss(found.float(), wanted.float()) / wanted.float().square().mean().clamp(min=1e-12)


def _streams(a: Any, b: Any) -> list[tuple[Tensor, Tensor]]:
    """Joint attention returns image and text tokens: the image tokens are compared."""
    return [(a[0], b[0])] if isinstance(a, tuple) else [(a, b)]
