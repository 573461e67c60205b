"""The training loss: cross-entropy with soft targets, and distillation from the class probabilities of a teacher."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from zoo.conversion.distill import AttentionDistillation, FeatureDistillation
from zoo.data.settings import AugmentSettings
from zoo.train.settings import DistillSettings


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)), the mean over the batch; logits [B, K] -> scalar, in
    float32.

    Hinton et al., arXiv 1503.02531, section 2; T^2 keeps the size of the gradients independent of T.
    """
    log_p = F.log_softmax(teacher.float() / temperature, dim=-1)
    log_q = F.log_softmax(student.float() / temperature, dim=-1)
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True) * temperature**2


def create_mixup(augment: AugmentSettings, num_classes: int) -> Mixup | None:
    """timm's mixup and cutmix, or None when both are off. It draws from numpy's generator and needs an even batch."""
    if not (augment.mixup or augment.cutmix):
        return None
    return Mixup(
        mixup_alpha=augment.mixup,
        cutmix_alpha=augment.cutmix,
        prob=augment.mix_prob,
        label_smoothing=augment.smoothing,
        num_classes=num_classes,
    )


class Classification(nn.Module):
    """(logits [B, K], targets [B] or [B, K], images [B, 3, H, W]) -> losses by name; "total" is minimised.

    With a teacher it is (1 - alpha) CE + alpha T^2 KL(teacher || student), and with `distill.attention` and
    `distill.features` these times the distances of `AttentionDistillation` and `FeatureDistillation` as well; the
    teacher sees the same images.
    """

    def __init__(
        self, smoothing: float, mixed: bool, distill: DistillSettings, teacher: nn.Module | None, student: nn.Module
    ) -> None:
        super().__init__()
        self.criterion = SoftTargetCrossEntropy() if mixed else LabelSmoothingCrossEntropy(smoothing)
        self.distill = distill
        self.teacher = teacher
        self.matches: dict[str, AttentionDistillation | FeatureDistillation] = {}
        for name, match in (("attention", AttentionDistillation), ("features", FeatureDistillation)):
            if teacher is not None and getattr(distill, name):
                self.matches[name] = match(student, teacher)

    @contextmanager
    def listen(self, which: str = "student") -> Iterator[None]:
        """A context around the student's forward pass."""
        with ExitStack() as stack:
            for match in self.matches.values():
                stack.enter_context(match.listen(which))
            yield

    def forward(self, logits: Tensor, targets: Tensor, images: Tensor) -> dict[str, Tensor]:
        cross_entropy = self.criterion(logits.float(), targets)
        if self.teacher is None:
            return {"total": cross_entropy, "loss": cross_entropy}
        with torch.no_grad(), self.listen("teacher"):
            wanted = self.teacher(images)
        distance = distillation_loss(logits, wanted, self.distill.temperature)
        alpha = self.distill.alpha
        found = {"total": (1 - alpha) * cross_entropy + alpha * distance, "loss": cross_entropy}
        for name, match in self.matches.items():
            found[name] = match.loss()
            found["total"] = found["total"] + getattr(self.distill, name) * found[name]
        return found
