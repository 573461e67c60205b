"""How denoisers of each kind are called."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.data.latents.encoders import IMAGE_LATENTS
from zoo.data.latents.reading import LABELS
from zoo.models.diffusers.families import known_family


class Manner(NamedTuple):
    """How a kind of denoisers is called: arguments beside input, time and conditions, a factor on the time, whether a
    class is given as a token, and whether input and output are tokens [B, T H W, C]."""

    extra: dict[str, Any]
    time_factor: float
    class_tokens: int = 0
    packed: bool = False


def manner_of(model: Any, shape: tuple[int, ...], about: dict[str, Any]) -> Manner:
    """How `model`, not wrapped, is called on samples of this shape; about: what is noted of the data."""
    family = known_family(model)
    factor = model.config[family.time_factor] if family.time_factor else 1.0
    tokens = model.config[family.classes] if family.class_tokens else 0
    return Manner(family.arguments(shape, about), factor, tokens, family.packed)


def predict(model: Any, x: Tensor, timestep: Tensor, condition: dict[str, Tensor], manner: Manner) -> Tensor:
    """The output of a denoiser of any kind, [B, outputs C, ...]."""
    if manner.time_factor != 1.0:
        timestep = timestep * manner.time_factor
    condition = dict(condition)
    if manner.class_tokens and LABELS in condition:
        condition["encoder_hidden_states"] = class_tokens(condition.pop(LABELS), manner.class_tokens)
    if IMAGE_LATENTS in condition:
        x = torch.cat([x, condition.pop(IMAGE_LATENTS).to(x)], dim=1)
    tokens = x.flatten(2).mT if manner.packed else x
    out = model(hidden_states=tokens, timestep=timestep, **condition, **manner.extra, return_dict=False)[0]
    return out.mT.unflatten(2, x.shape[2:]) if manner.packed else out


def class_tokens(labels: Tensor, classes: int) -> Tensor:
    """Class numbers [B] as one token each, [B, 1, classes]: one-hot, so that the projection of text in the model is a
    table of class embeddings; the number `classes` stands for no class, all zeros."""
    return F.one_hot(labels, classes + 1)[:, None, :classes].float()
