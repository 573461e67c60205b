"""The transfer of a diffusion model: see `zoo.train.layerwise`."""

from dataclasses import dataclass

from torch import Tensor

from zoo.data.latents.reading import Clean
from zoo.diffusion.call import predict
from zoo.train.denoising.run import DiffusionRun
from zoo.train.denoising.settings import DiffusionSettings
from zoo.train.layerwise import Transferring, TransferShare


@dataclass(frozen=True)
class DiffusionTransferSettings(TransferShare, DiffusionSettings):
    """A transfer of a diffusion model. See the sections."""


class DiffusionTransfer(Transferring, DiffusionRun):
    """A run of `DiffusionTransferSettings`, with the random times, noise and dropped conditions of training."""

    settings: DiffusionTransferSettings

    def set_up(self) -> None:
        super().set_up()
        self.prepare_transfer(self.teacher and self.teacher.model)

    def loss(self, batch: Clean) -> Tensor:
        assert self.teacher is not None
        inputs, _ = self.draw(batch)
        return self.transfer_loss(self.teacher.model, lambda model: predict(model, *inputs), len(batch.x0))
