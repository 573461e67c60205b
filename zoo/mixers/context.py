"""What a mixer is told: of its attention layer when it is built, and besides q, k and v when it is called."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.grid import Grid


class LayerSpec(NamedTuple):
    """The attention layer that a mixer is built for.

    dim: width C of the hidden states.
    num_heads, head_dim: heads of q, and channels D of each head.
    num_kv_heads: heads of k and v where several heads of q share them; None: as many as q has.
    scale: factor on the scores q.k; None: head_dim ** -0.5.
    grid: token grid of the model's usual input; None where the model does not say it.
    prefix: tokens before the grid (class, register).
    attn_drop, fused: dropout of the attention matrix, and whether the layer uses torch's fused attention.
    device, dtype: of the layer's weights.
    """

    dim: int
    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    scale: float | None = None
    grid: Grid | None = None
    prefix: int = 0
    attn_drop: float = 0.0
    fused: bool = True
    device: Any = None
    dtype: torch.dtype | None = None

    @property
    def kv_heads(self) -> int:
        """Heads of k and v."""
        return self.num_kv_heads or self.num_heads

    @property
    def placement(self) -> dict[str, Any]:
        """device and dtype, as the constructors of torch take them."""
        return {"device": self.device, "dtype": self.dtype}


@dataclass(frozen=True, eq=False)  # its callables make it neither equal nor hashable by value: dynamo hashes it
class Rotation:
    """A host's rotary embedding.

    turn: what the host does to a tensor, [B, N, H, D] -> [B, N, H, D]; calling the rotation calls it.
    tables: the same as (cos, sin), [N, D / 2] or [N, H, D / 2] each, 1 and 0 for tokens that are not turned.
    half: whether channels (i, i + D / 2) are a pair, rather than (2i, 2i + 1).
    """

    turn: Callable[[Tensor], Tensor]
    tables: Callable[[], tuple[Tensor, Tensor]]
    half: bool = False

    def __call__(self, t: Tensor) -> Tensor:
        return self.turn(t)

    def lengths(self, t: Tensor) -> Tensor:
        """Lengths of the pairs of channels that are rotated, [B, N, H, D] -> [B, N, H, D / 2]. However two vectors are
        rotated, the product of their lengths is at least the absolute value of their own."""
        pairs, axis = ((2, -1), -2) if self.half else ((-1, 2), -1)
        dtype = torch.promote_types(t.dtype, torch.float32)
        return torch.linalg.vector_norm(t.unflatten(-1, pairs), dim=axis, dtype=dtype).to(t.dtype)


@dataclass(frozen=True)
class Context:
    """The surroundings of one attention call.

    x: hidden states [B, N, C] that enter the attention (gates read them).
    grid: (H, W) or (T, H, W) of the patch tokens; None when the tokens have no layout (a random subset, mixed sizes).
    prefix, suffix: tokens before and after the patches (class, register, text).
    rotate: the host's rotary embedding, a function [B, N, H, D] -> [B, N, H, D] (hosts give a `Rotation`); None when it
        has none.
    mask: the host's attention mask, of any shape that it broadcasts to [B, H, N, N]; only softmax can honour it.
    key_padding_mask: [B, N] bool, True for a real token; every mixer that is not causal honours it. A host gives this
        one or `mask`. Padded tokens get zeros from a linear mixer and something from softmax, as in the host.
    is_causal: the host asks for causal attention.
    prepared: q and k are features that are turned already; hosts do that only for a mixer whose `early_map` allows it.
    qkv: the tensor [B, N, 3, H, D] that q, k and v are views of, where the host has one and changes none of them: a
        mixer may read it in their place.
    """

    x: Tensor
    grid: Grid | None = None
    prefix: int = 0
    suffix: int = 0
    rotate: Callable[[Tensor], Tensor] | None = None
    mask: Tensor | None = None
    is_causal: bool = False
    prepared: bool = False
    qkv: Tensor | None = None
    key_padding_mask: Tensor | None = None
