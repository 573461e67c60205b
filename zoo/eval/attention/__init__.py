"""The attention matrix that a mixer uses, whatever its form: what it does to values that are one-hot in the token.

Every mixer here is linear in v up to its last norm and gate, o = W(q, k) v. With v = I [N, N] the output is W itself.
For softmax that is the attention map; for a linear mixer it is the matrix it never forms. Only meant for pictures and
tests: memory grows with N^2. `probes` measures such matrices, `pictures` draws them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo.errors import unknown_name
from zoo.grid import Grid
from zoo.mixers import Mixer
from zoo.models.convert import swap
from zoo.models.timm.attention import Site


class Attention(NamedTuple):
    """What one layer does to the tokens of one sample: W [H, N, N] (row: query token), where the patches lie, and the
    output W v of its mixer before norm and gate, [N, H, D]."""

    layer: int
    mixer: str
    grid: Grid | None
    prefix: int
    weights: Tensor
    output: Tensor


@torch.no_grad()
def attentions(model: nn.Module, run: Callable[[], Any], layers: list[int] | None = None) -> Iterator[Attention]:
    """The effective attention of every layer, or of some, in a forward pass `run()` of `model`, of its first sample.

    A softmax timm model is read through the softmax mixer, which computes the same function. W leaves out the norm and
    the gate behind a mixer, and its columns are seen through the depthwise convolution of one channel each where
    there is one of v (`depthwise`, `lepe`): W v is not the output then. Raises ValueError for a layer that does
    not exist.
    """
    if not any(isinstance(m, Site) for m in model.modules()):
        swap(model, "softmax")
    sites = [m for m in model.modules() if isinstance(m, Site)]
    wanted = range(len(sites)) if layers is None else layers
    for layer in wanted:
        if not 0 <= layer < len(sites):
            raise unknown_name("attention layer", layer, [str(i) for i in range(len(sites))])
    with ExitStack() as stack:
        calls = {layer: stack.enter_context(_recorded(sites[layer].mixer)) for layer in wanted}
        run()
    for layer, recorded in calls.items():
        site = sites[layer]
        q, k, v, ctx = recorded[0]
        ctx = replace(ctx, qkv=None)  # the mixer is to read the values that follow
        with _without_last_steps(site.mixer):
            weights, output = _weights(site.mixer, q, k, v, ctx), site.mixer(q, k, v, ctx)[0]
        yield Attention(layer, site.mixer_name, site.grid, ctx.prefix, weights, output)


def attention_matrix(model: nn.Module, image: Tensor, layer: int, head: int) -> Tensor:
    """The effective attention [N, N] (row: query token, column: key token) of one head of one layer on an image [3,
    H, W]; prefix tokens come first. Raises ValueError when the layer or head does not exist."""
    (found,) = attentions(model, lambda: model.eval()(image[None]), [layer])
    if not 0 <= head < len(found.weights):
        raise unknown_name("head", head, [str(i) for i in range(len(found.weights))])
    return found.weights[head]


def _weights(mixer: nn.Module, q: Tensor, k: Tensor, v: Tensor, ctx: Any) -> Tensor:
    """[H, N, N]: dv columns of the identity at a time, so that depthwise parts see their own width."""
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
    """`mixer` up to what is not linear in v."""
    norm, gate = mixer.norm, mixer.gate
    mixer.norm = mixer.gate = None
    try:
        yield
    finally:
        mixer.norm, mixer.gate = norm, gate


@contextmanager
def _recorded(mixer: nn.Module) -> Iterator[list[tuple]]:
    """The arguments of every call of `mixer` inside the block."""
    calls: list[tuple] = []
    handle = mixer.register_forward_pre_hook(lambda _, arguments: calls.append(arguments))
    try:
        yield calls
    finally:
        handle.remove()
