"""Effective attention matrices of mixers, computed from one-hot values.

Without its norm and gate, every mixer is linear in v, o = W(q, k) v, so that v = I [N, N] gives the output W. For
softmax, W is the attention map; a linear mixer never computes it. Use this for plots and tests only, since memory grows
with N^2.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zoo.conversion.hooks import record_mixer_calls
from zoo.errors import unknown_name
from zoo.grid import Grid
from zoo.mixers import Mixer
from zoo.mixers.context import Context
from zoo.models.convert import swap
from zoo.models.timm.attention import Site


class LayerAttention(NamedTuple):
    """Effective attention of one layer on one sample.

    layer: index of the layer.  mixer: name of its mixer.  grid: token grid, None if there is none.  prefix: number of
    prefix tokens.  weights: W [H, N, N] (row: query token, column: key token).  output: output W v of the mixer before
    norm and gate [N, H, D].
    """

    layer: int
    mixer: str
    grid: Grid | None
    prefix: int
    weights: Tensor
    output: Tensor


@torch.no_grad()
def attentions(
    model: nn.Module, run: Callable[[], object], layers: list[int] | None = None
) -> Iterator[LayerAttention]:
    """Yield the effective attention of each layer for the first sample of a forward pass.

    run: calls `model` once.  layers: indices of the layers; None for all. A softmax timm model is converted in place to
    the softmax mixer, which computes the same function. With a depthwise convolution of v (`depthwise`, `lepe`) each
    column of W includes the convolution of one channel, so that W v is not the output. Raises ValueError for a layer
    that does not exist.
    """
    if not any(isinstance(m, Site) for m in model.modules()):
        swap(model, "softmax")
    sites = [m for m in model.modules() if isinstance(m, Site)]
    wanted = dict.fromkeys(range(len(sites)) if layers is None else layers)
    for layer in wanted:
        if not 0 <= layer < len(sites):
            raise unknown_name("attention layer", layer, [str(i) for i in range(len(sites))])
    with record_mixer_calls({str(layer): sites[layer] for layer in wanted}) as calls:
        run()
    for layer in wanted:
        site = sites[layer]
        q, k, v, ctx = calls[str(layer)].arguments
        ctx = replace(ctx, qkv=None)  # the mixer must read the values passed below
        with _without_last_steps(site.mixer):
            weights, output = _weights(site.mixer, q, k, v, ctx), site.mixer(q, k, v, ctx)[0]
        yield LayerAttention(layer, site.mixer_name, site.grid, ctx.prefix, weights, output)


def attention_matrix(model: nn.Module, image: Tensor, layer: int, head: int) -> Tensor:
    """Compute the effective attention [N, N] of one head for an image [3, H, W].

    Rows are query tokens, columns key tokens; prefix tokens come first. Raises ValueError for a layer or head that does
    not exist.
    """
    (found,) = attentions(model, lambda: model.eval()(image[None]), [layer])
    if not 0 <= head < len(found.weights):
        raise unknown_name("head", head, [str(i) for i in range(len(found.weights))])
    return found.weights[head]


def _weights(mixer: nn.Module, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
    """Compute W [H, N, N] from blocks of dv columns of the identity, dv being the width of v: a depthwise convolution
    accepts no other number of channels."""
    n, dv = v.shape[1], v.shape[3]
    columns = []
    for start in range(0, n, dv):
        block = torch.zeros_like(v)
        width = min(dv, n - start)
        eye = torch.eye(width, device=v.device, dtype=v.dtype)
        block[:, start : start + width, :, :width] = eye[:, None]
        columns.append(mixer(q, k, block, ctx)[0, :, :, :width])
    return torch.cat(columns, dim=2).transpose(0, 1)


@contextmanager
def _without_last_steps(mixer: Mixer) -> Iterator[None]:
    """Context in which `mixer` has no norm and no gate, which are not linear in v."""
    norm, gate = mixer.norm, mixer.gate
    mixer.norm = mixer.gate = None
    try:
        yield
    finally:
        mixer.norm, mixer.gate = norm, gate
