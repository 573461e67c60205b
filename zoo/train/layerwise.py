"""Transfer: each converted attention layer learns to return what the softmax layer returned, on its own.

For most of the run a layer is fed with what the softmax model feeds its own layer, so that layers are independent and
one forward pass of the teacher serves them all; for the last part with the student's own hidden states, which absorbs
the drift. Only the attention layers are trained. The runs are those of `zoo.train`, with its records, checkpoints and
bit-exact continuation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.conversion.distill import relative_distance
from zoo.conversion.hooks import converted_layers, record_calls
from zoo.data import Batch
from zoo.train.classification import Trainer
from zoo.train.settings import TrainSettings


def attention_distances(
    student: Any, teacher: Any, run: Callable[[Any], Any], own_inputs: bool = False
) -> dict[str, Tensor]:
    """The distance of each converted layer of `student` to the teacher's, with gradients to that layer alone.

    run: a forward pass of a model on the inputs.  own_inputs: the layers see the student's hidden states.
    """
    layers = converted_layers(student)
    with torch.no_grad(), record_calls(teacher, layers) as wanted:
        run(teacher)
    inputs = wanted
    if own_inputs:
        with torch.no_grad(), record_calls(student, layers) as inputs:
            run(student)
    return {n: relative_distance(inputs[n].repeat(layers[n]), wanted[n].output) for n in layers}


def train_attention_only(model: Any) -> None:
    """Freeze whatever is not part of a converted attention layer."""
    model.requires_grad_(False)
    for layer in converted_layers(model).values():
        layer.requires_grad_(True)


class Transferring:
    """What the transfers of both kinds of models share: which parameters learn, the loss, the checks."""

    model: Any
    accelerator: Any
    settings: Any
    step: int
    last_step: int
    note: Callable[..., None]
    autocast: Callable[[], Any]

    def prepare_transfer(self, teacher: Any) -> None:
        """Raises ValueError without a teacher, a converted layer, or on several processes."""
        if teacher is None:
            raise ValueError("a transfer needs the softmax model: set distill.teacher to its run folder")
        if self.accelerator.num_processes > 1:
            raise ValueError("a transfer calls the layers one by one, which does not add gradients over processes: one")
        if self.settings.run.compile:
            raise ValueError("a transfer calls the layers one by one, which run.compile closes: leave it out")
        train_attention_only(self.model)
        self.laid_out = False

    def transfer_loss(self, teacher: Any, run: Callable[[Any], Any], n: int) -> Tensor:
        """The sum over layers, whose gradients do not meet."""
        if not self.laid_out:  # tells the layers their token grid
            with torch.no_grad():
                run(self.model)
            self.laid_out = True
        own = self.step >= round((1 - self.settings.student_share) * self.last_step)
        with self.autocast():
            found = attention_distances(self.model, teacher, run, own)
        for name, value in found.items():
            self.note(f"distance/{name}", value, n)
        total = torch.stack(list(found.values()))
        self.note("loss", total.mean(), n)
        return total.sum()


@dataclass(frozen=True)
class TransferShare:
    """What a transfer has beside the settings of a run.

    student_share: last part of the run in which layers see the student's own hidden states
    """

    student_share: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        if not 0 <= self.student_share <= 1:
            raise ValueError(f"student_share is a part of the run, between 0 and 1, got {self.student_share}")


@dataclass(frozen=True)
class ImageTransferSettings(TransferShare, TrainSettings):
    """A transfer of an image model. See the sections."""


class ImageTransfer(Transferring, Trainer):
    """A run of `ImageTransferSettings`; labels are not used, evaluations are those of `Trainer`."""

    settings: ImageTransferSettings

    def set_up(self) -> None:
        super().set_up()
        self.prepare_transfer(self.parts.objective.teacher)

    def loss(self, batch: Batch) -> Tensor:
        return self.transfer_loss(self.parts.objective.teacher, lambda m: m(batch.images), len(batch.images))
