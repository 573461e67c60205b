"""Sites of diffusers models: attention modules whose attention is replaced by a mixer.

As in `zoo.models.timm.attention`, a site is a subclass of the host's attention class that overrides only `forward`, and
a live module is converted by changing its class. Projections and norms are always called as modules, since adapters,
quantisers and offloading replace or hook them. All q, k, v, o are [B, N, H, D]; x is [B, N, C].
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from zoo.grid import Grid
from zoo.mixers import Context
from zoo.models.checkpoint_tags import encode_tag
from zoo.models.timm.attention import Site, split_heads

PLAIN = ("AttnProcessor2_0", "FusedAttnProcessor2_0", "AttnProcessor", "SlicedAttnProcessor", "XFormersAttnProcessor")
JOINT = ("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0", "XFormersJointAttnProcessor")


class DiffusionSite(Site):
    """Base class of the sites of all families: allowed processors, projections and output."""

    processors: ClassVar[tuple[str, ...]] = PLAIN
    grid: Grid | None = None
    prefix: int = 0

    @classmethod
    def check_processor(cls, processor: object) -> None:
        """Raise ValueError for a processor that does more than the attention that the mixer replaces."""
        kind = type(processor).__name__
        if kind in (*PLAIN, *JOINT) and kind not in cls.processors:
            raise ValueError(
                f"{kind} computes another attention than this kind of layer has (joint with the text, or linear); "
                f"allowed: {', '.join(cls.processors)}"
            )
        if kind not in cls.processors:
            raise ValueError(
                f"{kind} does more than the self-attention that a mixer replaces (adapters and guidance are not "
                f"supported); allowed: {', '.join(cls.processors)}"
            )

    def set_processor(self, processor: object) -> None:
        """Set a standard processor, without effect on the mixer. Raises ValueError for any other processor."""
        self.check_processor(processor)
        super().set_processor(processor)

    @property
    def needs_grid(self) -> bool:
        """Whether the mixer needs the token grid."""
        return self.mixer.options.needs_grid

    def _tag(self) -> Tensor:
        return encode_tag(self.mixer.config).to(self.to_q.weight.device)

    @property
    def fused(self) -> bool:
        """Whether one projection computes q, k and v (`fuse_qkv_projections`)."""
        return hasattr(self, "to_qkv") and type(self.processor).__name__.startswith("Fused")

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Project x to q, k, v, [B, N, H D] each, without copies."""
        return self.to_qkv(x).chunk(3, dim=-1) if self.fused else (self.to_q(x), self.to_k(x), self.to_v(x))

    def output(self, o: Tensor) -> Tensor:
        """Project the output [B, N, H, D] -> [B, N, C]."""
        return self.to_out[1](self.to_out[0](o.flatten(2)))

    def refuse(self, arguments: Mapping[str, object], encoder_hidden_states: Tensor | None = None) -> None:
        """Raise ValueError for unknown keyword arguments, and for `encoder_hidden_states` of a self-attention layer."""
        if arguments:
            raise ValueError(f"a converted attention layer cannot honour the argument {next(iter(arguments))!r}")
        if encoder_hidden_states is not None:
            raise ValueError("a converted layer is self-attention: encoder_hidden_states must be None")


def real_keys(bias: Tensor) -> Tensor:
    """Convert a bias [B, 1, N], 0 for real keys and -10000 for padding, to [B, N] bool. Raises ValueError otherwise."""
    real = bias[:, 0] == 0
    if not torch.compiler.is_compiling() and not (real | (bias[:, 0] < -9000)).all():
        raise ValueError("linear mixers support attention masks of 0 (real) and -10000 (padding), not other biases")
    return real


def norm_heads(norm: nn.Module | None, t: Tensor) -> Tensor:
    """Apply the host's norm per head, in [B, H, N, D] so that gradients are summed in the same order as in the host."""
    return t if norm is None else norm(t.transpose(1, 2)).transpose(1, 2)


def rotate_pairs(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels 2 i and 2 i + 1 of t [B, N, H, W] in float32, in groups of D channels (feature maps may widen).

    cos, sin: broadcastable to [B, N, H, 1, D].
    """
    groups = t.unflatten(-1, (-1, cos.shape[-1]))
    even, odd = groups.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([-odd, even], dim=-1).flatten(-2)
    return (groups.float() * cos + rotated.float() * sin).to(t.dtype).flatten(-2)


class SelfAttentionSiteBase(DiffusionSite):
    """Base class of sites in self-attention whose only arguments are the hidden states and a mask."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **arguments: object,
    ) -> Tensor:
        """[B, N, C] -> [B, N, C]. Raises ValueError for an unsupported mask and unknown arguments."""
        self.refuse(arguments, encoder_hidden_states)
        return self.attend(hidden_states, attention_mask)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Compute the attention [B, N, C] -> [B, N, C]."""
        raise NotImplementedError


class SelfAttentionSite(SelfAttentionSiteBase, Attention):
    """Site in the self-attention of DiT and PixArt (`attn1`) and in the second attention of SD3.5 (`attn2`)."""

    processors = (*PLAIN, *JOINT)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """[B, N, C] -> [B, N, C]. mask: bias on the scores; two-sided mixers support padding [B, 1, N].

        Raises ValueError for any other mask that the mixer does not support.
        """
        padding = None
        if mask is not None and not self.mixer.forms_matrix and mask.shape[1] == 1:
            padding, mask = real_keys(mask), None
        if mask is not None:
            mask = self.prepare_attention_mask(mask, x.shape[1], x.shape[0]).unflatten(0, (x.shape[0], self.heads))
        x = self.with_cpe(x, self.prefix, padding)
        q, k, v = (split_heads(t, self.heads) for t in self.project(x))
        q, k = norm_heads(self.norm_q, q), norm_heads(self.norm_k, k)
        ctx = Context(x=x, grid=self.grid, prefix=self.prefix, mask=mask, key_padding_mask=padding)
        return self.output(self.mixer(q, k, v, ctx).to(q.dtype))
