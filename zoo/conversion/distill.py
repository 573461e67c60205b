"""Distillation losses on attention outputs and on the features of the classifier."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from zoo.conversion.hooks import Call, converted_layers, layers_of, record_calls


def relative_distance(output: Tensor, target: Tensor) -> Tensor:
    """Compute the MSE relative to the mean square of `target`, in float32; an output of zeros has distance 1."""
    return F.mse_loss(output.float(), target.float()) / target.float().square().mean().clamp(min=1e-12)


class AttentionDistillation:
    """Mean relative distance between the attention outputs of student and teacher, over the converted layers.

    In joint attention, only image tokens are compared. Raises ValueError for a student without converted layers and for
    a teacher that lacks one of them.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        try:
            self.names = list(converted_layers(student))
        except ValueError as error:
            raise ValueError(
                "distill.attention compares converted layers, and the model has none: set model.mixer"
            ) from error
        missing = set(self.names) - layers_of(teacher).keys()
        if missing:
            raise ValueError(f"the teacher has no layer {min(missing)}, which distill.attention compares")
        self.models = {"student": student, "teacher": teacher}
        self.calls: dict[str, dict[str, Call]] = {}

    @contextmanager
    def record_outputs(self, which: str) -> Iterator[None]:
        """Record a forward pass of the "student" or the "teacher"; later recomputation of checkpoints is ignored."""
        with record_calls(self.models[which], self.names) as self.calls[which]:
            yield

    def loss(self) -> Tensor:
        """Compute the loss of the last recorded forward passes."""
        ours, theirs = self.calls["student"], self.calls["teacher"]
        return torch.stack([relative_distance(ours[n].output, theirs[n].output) for n in self.names]).mean()


class FeatureDistillation:
    """Relative distance between the features [B, C] before the classifiers of two timm models.

    As in the second stage of ViT-AdaLA, arXiv 2603.16063. Raises ValueError for a model without a single linear
    classifier, and for features of different widths.
    """

    def __init__(self, student: VisionTransformer, teacher: VisionTransformer) -> None:
        self.heads = {"student": student.get_classifier(), "teacher": teacher.get_classifier()}
        for which, head in self.heads.items():
            if not isinstance(head, nn.Linear):
                raise ValueError(
                    f"distill.features needs one linear classifier, the {which} has a {type(head).__name__}"
                )
        ours, theirs = (head.in_features for head in self.heads.values())
        if ours != theirs:
            raise ValueError(f"distill.features needs a teacher with {ours} features, it has {theirs}")
        self.features: dict[str, Tensor] = {}

    @contextmanager
    def record_outputs(self, which: str) -> Iterator[None]:
        """Record a forward pass of the "student" or the "teacher"."""
        with self.heads[which].register_forward_pre_hook(lambda _, x: self.features.update({which: x[0]})):
            yield

    def loss(self) -> Tensor:
        """Compute the loss of the last recorded forward passes."""
        return relative_distance(self.features["student"], self.features["teacher"])
