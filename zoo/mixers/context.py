"""Further inputs of mixers: the layer they are built for and the context of each call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from zoo.grid import Grid


class Placement(TypedDict):
    """Keywords of torch constructors."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class LayerSpec(NamedTuple):
    """Attention layer that a mixer is built for.

    dim: width C of the hidden states.
    num_heads, head_dim: number of query heads and channels D per head.
    num_kv_heads: number of key/value heads (grouped-query attention); None: num_heads.
    scale: factor on the scores q.k; None: head_dim ** -0.5.
    grid: token grid of the model's default input size; None if unknown.
    prefix: number of tokens before the grid (class, register).
    layer_index: number of the attention layer in its model, from 0. num_layers: number of them; None if unknown.
    attn_drop, fused: dropout rate of the attention matrix; whether the layer uses torch's fused attention.
    device, dtype: device and dtype of the layer's weights.
    """

    dim: int
    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    scale: float | None = None
    grid: Grid | None = None
    prefix: int = 0
    layer_index: int = 0
    num_layers: int | None = None
    attn_drop: float = 0.0
    fused: bool = True
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def placement(self) -> Placement:
        """Keywords device and dtype of torch constructors."""
        return {"device": self.device, "dtype": self.dtype}


@dataclass(frozen=True, eq=False)  # its callables make it neither equal nor hashable by value: dynamo hashes it
class Rotation:
    """Rotary embedding of the host model.

    rotate: rotates a tensor as the host does, [B, N, H, D] -> [B, N, H, D]; calling the object calls it.
    tables: returns the same rotation as (cos, sin), [N, D / 2] or [N, H, D / 2] each; 1 and 0 for unrotated tokens.
    half: whether channels (i, i + D / 2) form a pair, rather than (2i, 2i + 1).
    """

    rotate: Callable[[Tensor], Tensor]
    tables: Callable[[], tuple[Tensor, Tensor]]
    half: bool = False

    def __call__(self, t: Tensor) -> Tensor:
        return self.rotate(t)

    def lengths(self, t: Tensor) -> Tensor:
        """Norms of the rotated channel pairs, [B, N, H, D] -> [B, N, H, D / 2].

        The dot product of two vectors of norms is an upper bound of |q.k| under every rotation.
        """
        pairs, axis = ((2, -1), -2) if self.half else ((-1, 2), -1)
        dtype = torch.promote_types(t.dtype, torch.float32)
        return torch.linalg.vector_norm(t.unflatten(-1, pairs), dim=axis, dtype=dtype).to(t.dtype)


@dataclass(frozen=True)
class Context:
    """Context of one attention call.

    x: hidden states [B, N, C] that enter the attention (gates read them).
    grid: (H, W) or (T, H, W) of the patch tokens; None if the tokens have no layout (random subset, mixed sizes).
    prefix, suffix: number of tokens before and after the patches (class, register, text).
    rotate: rotary embedding of the host, [B, N, H, D] -> [B, N, H, D] (usually a `Rotation`); None without one.
    mask: attention mask of the host, broadcastable to [B, H, N, N]; supported by softmax only.
    key_padding_mask: [B, N] bool, True for real tokens; supported by every two-sided mixer. A host passes either this
        or `mask`. Outputs of padded tokens are zero for linear mixers and undefined for softmax.
    is_causal: whether the host requires causal attention.
    prepared: feature map and rotation were already applied to q and k; allowed only if the mixer has a `fusable_map`.
    qkv: packed tensor [B, N, 3, H, D] of which q, k and v are unmodified views, if there is one; a mixer may read it
        instead of them.
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
