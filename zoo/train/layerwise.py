"""Layer-wise distillation: each converted attention layer learns to reproduce its softmax layer.

Only the converted attention layers are trained, each independently of the others. For most of the run, a layer gets the
inputs of the teacher's layer, so that one forward pass of the teacher serves all layers. For the last fraction of the
run, it gets the student's own hidden states, so that it learns to correct the errors of earlier layers.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo.conversion.distill import relative_distance
from zoo.conversion.hooks import converted_layers, record_calls
from zoo.data import Batch
from zoo.train.classification import ClassificationRun
from zoo.train.loop import TrainingRun

STUDENT_SHARE = 0.2  # last fraction of the run, in which layers get the student's own hidden states
Forward = Callable[[nn.Module], Tensor]  # calls a model on the inputs of a batch


class ImageTransfer(ClassificationRun):
    """Layer-wise distillation of an image model, without labels. Evaluation is inherited from `ClassificationRun`."""

    def set_up(self) -> None:
        super().set_up()
        self.layerwise = LayerwiseLoss(self, self.setup.objective.teacher)

    def loss(self, batch: Batch) -> Tensor:
        return self.layerwise(lambda model: model(batch.images), len(batch.images))


class LayerwiseLoss:
    """Loss of layer-wise distillation: the sum of the distances between the outputs of the student's converted layers
    and of the teacher's layers. The gradient of a distance reaches only its own layer.

    Freezes all other parameters of the model of `run`. Raises ValueError without a teacher or a converted layer, for
    several processes, and with run.compile.
    """

    def __init__(self, run: TrainingRun, teacher: nn.Module | None) -> None:
        if teacher is None:
            raise ValueError("a transfer needs the softmax model: set distill.teacher to its run folder")
        if run.accelerator.num_processes > 1:
            raise ValueError("a transfer calls the layers one by one, which does not add gradients over processes: one")
        if run.settings.run.compile:
            raise ValueError("a transfer calls the layers one by one, which run.compile closes: leave it out")
        run.model.requires_grad_(False)
        for layer in converted_layers(run.model).values():
            layer.requires_grad_(True)
        self.run, self.teacher = run, teacher
        self.own_from = round((1 - STUDENT_SHARE) * run.last_step)  # step from which layers get the student's inputs
        self.grid_set = False

    def __call__(self, forward: Forward, n: int) -> Tensor:
        """Compute the loss. forward: calls a model on a batch of n samples."""
        run = self.run
        if not self.grid_set:  # a forward pass sets the token grid of the layers
            with torch.no_grad():
                forward(run.model)
            self.grid_set = True
        with run.autocast():
            distances = attention_distances(run.model, self.teacher, forward, run.step >= self.own_from)
        for name, value in distances.items():
            run.metrics.add(f"distance/{name}", value, n)
        total = torch.stack(list(distances.values()))
        run.metrics.add("loss", total.mean(), n)
        return total.sum()


def attention_distances(
    student: nn.Module, teacher: nn.Module, forward: Forward, own_inputs: bool = False
) -> dict[str, Tensor]:
    """Compute the relative distance between the outputs of each converted layer of `student` and of the teacher's
    layer, by layer name. The gradient of a distance reaches only its own layer.

    own_inputs: whether layers get the student's hidden states or the teacher's.
    """
    layers = converted_layers(student)
    with torch.no_grad(), record_calls(teacher, layers) as wanted:
        forward(teacher)
    inputs = wanted
    if own_inputs:
        with torch.no_grad(), record_calls(student, layers) as inputs:
            forward(student)
    return {n: relative_distance(inputs[n].repeat(layers[n]), wanted[n].output) for n in layers}
