"""Distances between a student and its teacher inside: of what their attention layers return, of what their classifiers
get."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.conversion.hooks import Call, converted_layers, layers_of, record_calls


def relative_distance(found: Tensor, wanted: Tensor) -> Tensor:
    """Mean square of the difference over the mean square of `wanted`, in float32: 1 is as bad as no output."""
    return F.mse_loss(found.float(), wanted.float()) / wanted.float().square().mean().clamp(min=1e-12)


class AttentionDistillation:
    """Listens to a forward pass of the student and to one of the teacher; `loss` is the mean distance of their layers.

    Converted layers count, and of joint attention the image tokens. Raises ValueError for a student without a converted
    layer.
    """

    def __init__(self, student: Any, teacher: Any) -> None:
        try:
            self.names = list(converted_layers(student))
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
        heard = record_calls(self.models[which], self.names)
        return _Keeping(self.found, which, heard)

    def loss(self) -> Tensor:
        """The mean over layers of the distance of the last two passes."""
        ours, theirs = self.found["student"], self.found["teacher"]
        return torch.stack([relative_distance(ours[n].output, theirs[n].output) for n in self.names]).mean()


class FeatureDistillation:
    """Listens to a forward pass of two image models; `loss` is the distance of the features [B, C] that they classify.

    The final features of ViT-AdaLA, arXiv 2603.16063 (its second stage). Raises ValueError for a model without one
    classifier that is a linear layer, and for features of different widths.
    """

    def __init__(self, student: Any, teacher: Any) -> None:
        self.heads = {"student": student.get_classifier(), "teacher": teacher.get_classifier()}
        for which, head in self.heads.items():
            if not isinstance(head, nn.Linear):
                raise ValueError(
                    f"distill.features needs one linear classifier, the {which} has a {type(head).__name__}"
                )
        ours, theirs = (head.in_features for head in self.heads.values())
        if ours != theirs:
            raise ValueError(f"distill.features needs a teacher of {ours} features, it has {theirs}")
        self.found: dict[str, Tensor] = {}

    @contextmanager
    def listen(self, which: str) -> Iterator[None]:
        """A context around a forward pass of the "student" or the "teacher"."""
        handle = self.heads[which].register_forward_pre_hook(lambda _, inputs: self.found.update({which: inputs[0]}))
        try:
            yield
        finally:
            handle.remove()

    def loss(self) -> Tensor:
        """The distance of the last two passes."""
        return relative_distance(self.found["student"], self.found["teacher"])


class _Keeping:
    """`record_calls`, whose calls stay in a dict under a name."""

    def __init__(self, kept: dict[str, dict[str, Call]], which: str, heard: Any) -> None:
        self.kept, self.which, self.heard = kept, which, heard

    def __enter__(self) -> None:
        self.kept[self.which] = self.heard.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.heard.__exit__(*error)
