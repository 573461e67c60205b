"""Top-1 and top-5 accuracy, and the predictions for each image."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.data.batch import Batch
from zoo.precision import evaluating

TOP = 5


@dataclass(frozen=True)
class Predictions:
    """Predictions for all readable images.

    top: most likely classes [N, 5], in order (fewer columns for fewer classes).  labels: true classes [N].  index:
    numbers of the images [N].  loss: cross entropy in nats [N].  unreadable: number of unreadable images, left out.
    """

    top: np.ndarray
    labels: np.ndarray
    index: np.ndarray
    loss: np.ndarray
    unreadable: int

    def correct(self, k: int = 1) -> np.ndarray:
        """Whether the label is among the k most likely classes, bool [N]."""
        return (self.top[:, :k] == self.labels[:, None]).any(1)

    def sums(self) -> Tensor:
        """Return sums over the images, float64 [5], to be added over processes: number of images, number correct
        among the top 1 and among the top 5, loss, number of unreadable images."""
        found = [len(self.labels), self.correct(1).sum(), self.correct(TOP).sum(), self.loss.sum(), self.unreadable]
        return torch.tensor([float(x) for x in found], dtype=torch.float64)

    @staticmethod
    def from_sums(sums: Tensor) -> dict[str, float]:
        """Compute top1 and top5 in percent, mean loss in nats, and numbers of images and unreadable images from
        `sums`."""
        n, one, five, loss, unreadable = sums.tolist()
        return {"top1": 100 * one / n, "top5": 100 * five / n, "loss": loss / n, "images": n, "unreadable": unreadable}

    def summary(self) -> dict[str, float]:
        """Return the values of `from_sums` for these predictions."""
        return self.from_sums(self.sums())


Autocast = Callable[[], AbstractContextManager]


def predict(model: nn.Module, batches: Iterable[Batch], autocast: Autocast = nullcontext) -> Predictions:
    """Run `model` on labelled batches, in evaluation mode (its mode is restored afterwards). Raises ValueError without
    batches."""
    return predict_all({"": model}, batches, autocast)[""]


@torch.no_grad()
def predict_all(
    models: dict[str, nn.Module], batches: Iterable[Batch], autocast: Autocast = nullcontext
) -> dict[str, Predictions]:
    """Run several models, given by name, as `predict` does, on the same batches, which are read once. An image that is
    repeated counts once. Raises ValueError without batches."""
    parts: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in models}
    with evaluating(*models.values()):
        for batch in batches:
            for name, model in models.items():
                parts[name].append(_predict_batch(model, batch, autocast))
    return {name: _join(found) for name, found in parts.items()}


def _predict_batch(model: nn.Module, batch: Batch, autocast: Autocast) -> tuple[Tensor, ...]:
    with autocast():
        logits = model(batch.images).float()
    loss = F.cross_entropy(logits, batch.labels, reduction="none")
    top = logits.topk(min(TOP, logits.shape[1]), dim=1).indices
    return top, batch.labels, batch.index, batch.read, loss


def _join(parts: list[tuple[Tensor, ...]]) -> Predictions:
    if not parts:
        raise ValueError("there are no images to evaluate")
    columns = [torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)]
    once = np.unique(columns[2], return_index=True)[1]
    top, labels, index, read, losses = (column[once] for column in columns)
    good = index == read
    return Predictions(top[good], labels[good], index[good], losses[good], int((~good).sum()))
