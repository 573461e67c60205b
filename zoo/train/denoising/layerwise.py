"""Layer-wise distillation of diffusion models: see `zoo.train.layerwise`."""

from dataclasses import dataclass

from torch import Tensor

from zoo.data.latents.reading import DiffusionBatch
from zoo.diffusion.call import call_denoiser
from zoo.train.denoising.run import DiffusionRun
from zoo.train.denoising.settings import DiffusionSettings
from zoo.train.layerwise import LayerwiseLoss, TransferShare


@dataclass(frozen=True)
class DiffusionTransferSettings(TransferShare, DiffusionSettings):
    """Layer-wise distillation of a diffusion model. See the sections."""


class DiffusionTransfer(DiffusionRun):
    """A run of `DiffusionTransferSettings`, with the random times, noise and dropped conditions of training."""

    settings: DiffusionTransferSettings

    def set_up(self) -> None:
        super().set_up()
        self.layerwise = LayerwiseLoss(self, self.teacher.model if self.teacher else None, self.settings.student_share)

    def loss(self, batch: DiffusionBatch) -> Tensor:
        inputs, _ = self.draw(batch)
        return self.layerwise(lambda model: call_denoiser(model, *inputs), len(batch.x0))
