"""The attention matrix that a mixer uses, whatever its form: what it does to values that are one-hot in the token.

Every mixer here is linear in v, o = W(q, k) v. With v = I [N, N] the output is W itself. For softmax that is the
attention map;
for a linear mixer it is the matrix it never forms. Only meant for pictures and tests: memory grows with N^2.
"""

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zoo.backbones.sites import Site
from zoo.convert import swap
from zoo.names import unknown_name


@torch.no_grad()
def attention_matrix(model: nn.Module, image: Tensor, layer: int, head: int) -> Tensor:
    """The effective attention [N, N] (row: query token, column: key token) of one head of one layer on an image [3,
    H, W].

    Prefix tokens come first. A softmax model is read through the softmax mixer, which computes the same function.
    Raises
    ValueError when the layer or head does not exist.
    """
    if not any(isinstance(m, Site) for m in model.modules()):
        swap(model, "softmax")
    sites = [m for m in model.modules() if isinstance(m, Site)]
    if not 0 <= layer < len(sites):
        raise unknown_name("attention layer", layer, [str(i) for i in range(len(sites))])
    mixer = sites[layer].mixer
    with _recorded(mixer) as calls:
        model.eval()(image[None])
    q, k, v, ctx = calls[0]
    ctx = replace(ctx, qkv=None)  # the mixer is to read the values that follow
    if not 0 <= head < v.shape[2]:
        raise unknown_name("head", head, [str(i) for i in range(v.shape[2])])
    n, dv = v.shape[1], v.shape[3]
    columns = []
    for start in range(0, n, dv):  # dv columns of the identity at a time, so that depthwise parts see their own width
        block = torch.zeros_like(v)
        width = min(dv, n - start)
        block[:, start : start + width, head, :width] = torch.eye(width, device=v.device, dtype=v.dtype)
        columns.append(mixer(q, k, block, ctx)[0, :, head, :width])
    return torch.cat(columns, dim=1)


@contextmanager
def _recorded(mixer: nn.Module) -> Any:
    """The arguments of every call of `mixer` inside the block."""
    calls: list[tuple] = []
    handle = mixer.register_forward_pre_hook(lambda _, arguments: calls.append(arguments))
    try:
        yield calls
    finally:
        handle.remove()
