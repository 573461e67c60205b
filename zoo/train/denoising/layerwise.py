"""Layer-wise distillation of diffusion models: see `zoo.train.layerwise`."""

from torch import Tensor

from zoo.data.latents.reading import DiffusionBatch
from zoo.diffusion.call import call_denoiser
from zoo.train.denoising.run import DiffusionRun
from zoo.train.layerwise import LayerwiseLoss


class DiffusionTransfer(DiffusionRun):
    """Layer-wise distillation of a diffusion model, with the random times, noise and dropped conditions of training."""

    def set_up(self) -> None:
        super().set_up()
        self.layerwise = LayerwiseLoss(self, self.teacher.model if self.teacher else None)

    def loss(self, batch: DiffusionBatch) -> Tensor:
        inputs, _ = self.draw(batch)
        return self.layerwise(lambda model: call_denoiser(model, *inputs), len(batch.x0))
