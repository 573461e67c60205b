"""What tells one family of diffusion transformers from another: the record at the end of each family's file.

Conversion, training, encoding and sampling read it; nothing else asks of which family a model is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo.grid import Grid

Scaling = float | list[float]  # one number, or one per channel


class VideoVae(NamedTuple):
    """A VAE of videos, whose first latent is the first frame alone.

    name: its class in diffusers.
    factors: vae -> (frames, pixels per side) of one latent.
    scaling: vae -> (scaling, shift): the transformer reads (z - shift) * scaling.
    """

    name: str
    factors: Callable[[Any], tuple[int, int]]
    scaling: Callable[[Any], tuple[Scaling, Scaling]]


def embeddings_and_mask(pipe: Any, prompts: list[str], **options: Any) -> dict[str, Tensor]:
    """What most text pipelines make of prompts: embeddings, and a mask of the tokens that are not padding."""
    found = pipe.encode_prompt(prompts, **options)
    return {"encoder_hidden_states": found[0], "encoder_attention_mask": found[1]}


def nothing_more(shape: tuple[int, ...], about: dict[str, Any]) -> dict[str, Any]:
    """No further arguments of the forward pass."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of diffusion transformers.

    name: what `model.kind` calls it.
    converted: class of the converted models, a subclass of the class in diffusers (`converted.host`).
    sites: self-attention layers: pattern of module names ("*" is a number) -> class of the site.
    left: pattern of the attention modules that stay as they are.
    mixer: what the self-attention of the host is.
    rotary: whether queries and keys are rotated.
    grid: token grid of the usual size, where the configuration of a model does not say it.
    trained: whether a transformer can be trained here.
    legacy_class: name of the class in earlier files of diffusers.
    packed: whether input and output are tokens [B, N, C].
    sized: whether a model from scratch is built for one size of the input (`sample_size`).
    classes: entry of the configuration with the number of classes; empty for models of prompts alone.
    class_tokens: whether a class is a token beside the prompt tokens, not an embedding.
    time_factor: entry of the configuration by which times are multiplied; empty for none.
    arguments: (shape of a sample, notes of the data) -> further arguments of the forward pass.
    initialise: sets the weights of a model from scratch; None keeps the initial weights of diffusers.
    pipelines: pipelines of diffusers that can be sampled and whose text encoders read prompts.
    first_frame: the one among them that makes videos from their first frame.
    encode: (pipeline, prompts, options) -> what the transformer gets of them; None if that is not known here.
    latent_patch: latents per side that the pipeline packs into one before the transformer's own patches.
    units: pipeline of videos -> (frames, pixels per side) of one latent.
    fps: frames per second of the videos that a pipeline makes, if it is not told.
    vae: its VAE of videos; None for one of images.
    vae_dtype: type in which the VAE is loaded; None for that of the pipeline.
    """

    name: str
    converted: Any
    sites: dict[str, type]
    left: str = ""
    mixer: str = "softmax"
    rotary: bool = False
    grid: Grid | None = None
    trained: bool = True
    legacy_class: str = ""
    packed: bool = False
    sized: bool = True
    classes: str = ""
    class_tokens: bool = False
    time_factor: str = ""
    arguments: Callable[[tuple[int, ...], dict[str, Any]], dict[str, Any]] = nothing_more
    initialise: Callable[[nn.Module], None] | None = None
    pipelines: tuple[str, ...] = ()
    first_frame: str = ""
    encode: Callable[..., dict[str, Tensor]] | None = None
    latent_patch: int = 1
    units: Callable[[Any], tuple[int, int]] | None = None
    fps: float = 0.0
    vae: VideoVae | None = None
    vae_dtype: torch.dtype | None = None

    @property
    def host(self) -> Any:
        """The class in diffusers."""
        return self.converted.host

    @property
    def grid_dims(self) -> int:
        """2 for images, 3 for videos."""
        return self.converted.grid_dims
