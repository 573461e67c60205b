"""Calling the denoisers of all families in the same way."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from diffusers import ModelMixin
from torch import Tensor, nn

from zoo.config import Tree
from zoo.data.latents.encoders import IMAGE_LATENTS
from zoo.data.latents.reading import LABELS
from zoo.models.diffusers.families import known_family


class CallSpec(NamedTuple):
    """How a denoiser is called.

    extra: keyword arguments other than input, timestep and conditions.  time_factor: factor of the timestep.
    class_tokens: number of classes if the class is given as a token, else 0.  packed: whether input and output are
    tokens [B, T H W, C] instead of [B, C, T, H, W].
    """

    extra: Tree
    time_factor: float
    class_tokens: int = 0
    packed: bool = False


def call_spec(model: ModelMixin, shape: tuple[int, ...], about: Tree) -> CallSpec:
    """Determine how a denoiser is called.

    model: the denoiser, not wrapped for distributed training.  shape: shape of a sample, [C, ...].  about: metadata of
    the data.
    """
    family = known_family(model)
    factor = model.config[family.time_factor] if family.time_factor else 1.0
    tokens = model.config[family.classes] if family.class_tokens else 0
    return CallSpec(family.arguments(shape, about), factor, tokens, family.packed)


def call_denoiser(
    model: nn.Module, x: Tensor, timestep: Tensor, condition: dict[str, Tensor], spec: CallSpec
) -> Tensor:
    """Call a denoiser on x [B, C, ...].

    timestep: [B].  condition: conditions by argument name. Returns the output [B, K C, ...], where K is 2 if the model
    also predicts the variance, else 1.
    """
    if spec.time_factor != 1.0:
        timestep = timestep * spec.time_factor
    condition = dict(condition)
    if spec.class_tokens and LABELS in condition:
        condition["encoder_hidden_states"] = class_tokens(condition.pop(LABELS), spec.class_tokens)
    if IMAGE_LATENTS in condition:
        x = torch.cat([x, condition.pop(IMAGE_LATENTS).to(x)], dim=1)
    tokens = x.flatten(2).mT if spec.packed else x
    out = model(hidden_states=tokens, timestep=timestep, **condition, **spec.extra, return_dict=False)[0]
    return out.mT.unflatten(2, x.shape[2:]) if spec.packed else out


def class_tokens(labels: Tensor, classes: int) -> Tensor:
    """Encode class numbers [B] as one-hot tokens [B, 1, classes], so that the model's text projection acts as a table
    of class embeddings. The number `classes` stands for no class and gives zeros."""
    return F.one_hot(labels, classes + 1)[:, None, :classes].float()
