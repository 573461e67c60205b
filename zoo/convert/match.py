"""The distance between what the attention layers of a converted model and of its softmax teacher return."""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.convert.calls import Call, converted, layers_of, recording


def relative_distance(found: Tensor, wanted: Tensor) -> Tensor:
    """Mean square of the difference over the mean square of `wanted`, in float32: 1 is as bad as no output."""
    return F.mse_loss(found.float(), wanted.float()) / wanted.float().square().mean().clamp(min=1e-12)


class AttentionMatch:
    """Listens to a forward pass of the student and to one of the teacher; `loss` is the mean distance of their layers.

    Converted layers count, and of joint attention the image tokens. Raises ValueError for a student without a converted
    layer.
    """

    def __init__(self, student: Any, teacher: Any) -> None:
        try:
            self.names = list(converted(student))
        except ValueError as error:
            raise ValueError(
                "distill.attention compares converted layers, and the model has none: set model.mixer"
            ) from error
        missing = set(self.names) - layers_of(teacher).keys()
        if missing:
            raise ValueError(f"distill.attention needs a teacher with the layer {min(missing)}, which it has not")
        self.models = {"student": student, "teacher": teacher}
        self.found: dict[str, dict[str, Call]] = {}

    def listen(self, which: str) -> AbstractContextManager[Any]:
        """A context around a forward pass of the "student" or the "teacher"; recomputing after it is not heard."""
        heard = recording(self.models[which], self.names)
        return _Keeping(self.found, which, heard)

    def loss(self) -> Tensor:
        """The mean over layers of the distance of the last two passes."""
        ours, theirs = self.found["student"], self.found["teacher"]
        return torch.stack([relative_distance(ours[n].output, theirs[n].output) for n in self.names]).mean()


class _Keeping:
    """`recording`, whose calls stay in a dict under a name."""

    def __init__(self, kept: dict[str, dict[str, Call]], which: str, heard: Any) -> None:
        self.kept, self.which, self.heard = kept, which, heard

    def __enter__(self) -> None:
        self.kept[self.which] = self.heard.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.heard.__exit__(*error)
