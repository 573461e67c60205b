"""Description of a family of diffusion transformers.

The file of a family ends with its description. Conversion, training, encoding and sampling read it; no other code tests
the class of a model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from diffusers import DiffusionPipeline, ModelMixin
from torch import Tensor, nn

from zoo.grid import Grid

if TYPE_CHECKING:
    from zoo.models.diffusers.models import HLADiffusionModel

Scaling = float | list[float]  # one number, or one per channel
Metadata = dict[str, Any]  # metadata of a data set: JSON values by name


class VideoVae(NamedTuple):
    """Description of a video VAE, whose first latent frame encodes the first frame only.

    name: class in diffusers.
    factors: vae -> compression factors (in time, in space).
    scaling: vae -> (scaling, shift): the input of the transformer is (z - shift) * scaling for latents z.
    """

    name: str
    factors: Callable[[ModelMixin], tuple[int, int]]
    scaling: Callable[[ModelMixin], tuple[Scaling, Scaling]]


def embeddings_and_mask(pipe: DiffusionPipeline, prompts: list[str], **options: object) -> dict[str, Tensor]:
    """Encode prompts as embeddings and a mask of real tokens, as most text pipelines do."""
    embeddings, mask, *_ = pipe.encode_prompt(prompts, **options)
    return {"encoder_hidden_states": embeddings, "encoder_attention_mask": mask}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Family of diffusion transformers.

    name: value of `model.kind`.
    converted: class of the converted models, a subclass of the class in diffusers (`converted.host`).
    sites: self-attention layers: pattern of module names ("*" stands for a number) -> converted class.
    skipped: pattern of the attention modules that are never converted.
    mixer: mixer that the self-attention of the host corresponds to.
    rotary: whether queries and keys have a rotary embedding.
    grid: token grid of the default size, if the configuration of a model does not contain it.
    trained: whether training is supported.
    packed: whether input and output are tokens [B, N, C].
    sized: whether a new model is built for one input size (`sample_size`).
    classes: configuration entry with the number of classes; empty for text-conditional models.
    class_tokens: whether a class is a token, like the prompt tokens, instead of an embedding.
    time_factor: configuration entry by which timesteps are multiplied; empty for none.
    arguments: (shape of a sample, metadata of the data) -> additional arguments of the forward pass.
    initialise: initialises a new model; None keeps the initialisation of diffusers.
    pipelines: diffusers pipelines that can be sampled and whose text encoders are used.
    first_frame: the image-to-video pipeline in `pipelines`, which continues a given first frame.
    encode: (pipeline, prompts, options) -> text inputs of the transformer; None if not supported.
    latent_patch: side of the squares of latents that the pipeline packs into one input vector of the transformer.
    units: video pipeline -> compression factors (in time, in space) of its VAE.
    fps: default frame rate of the videos of a pipeline, in frames per second.
    vae: video VAE; None for image models.
    vae_dtype: dtype in which the VAE is loaded; None for the dtype of the pipeline.
    """

    name: str
    converted: "type[HLADiffusionModel]"
    sites: dict[str, type]
    skipped: str = ""
    mixer: str = "softmax"
    rotary: bool = False
    grid: Grid | None = None
    trained: bool = True
    packed: bool = False
    sized: bool = True
    classes: str = ""
    class_tokens: bool = False
    time_factor: str = ""
    arguments: Callable[[tuple[int, ...], Metadata], dict[str, object]] = lambda shape, metadata: {}
    initialise: Callable[[nn.Module], None] | None = None
    pipelines: tuple[str, ...] = ()
    first_frame: str = ""
    encode: Callable[..., dict[str, Tensor]] | None = None
    latent_patch: int = 1
    units: Callable[[DiffusionPipeline], tuple[int, int]] | None = None
    fps: float = 0.0
    vae: VideoVae | None = None
    vae_dtype: torch.dtype | None = None

    @property
    def host(self) -> type[ModelMixin]:
        """Class in diffusers."""
        return self.converted.host

    @property
    def grid_dims(self) -> int:
        """2 for images, 3 for videos."""
        return self.converted.grid_dims
