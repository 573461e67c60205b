"""Sites in joint attention, where text and image tokens attend to each other: SD3 and Flux.

Only the image-to-image part becomes linear; whatever involves text stays softmax, at a cost linear in the number of
image tokens (text is short):

    text queries    o = softmax over all keys, as in the host
    image queries   o = (sum_text e^(s q.k) v + Z o_mixer) / (sum_text e^(s q.k) + Z)

o_mixer is the mixer over the image tokens alone, which stands for the host's average over the image keys, and Z for
their weight sum_image e^(s q.k) in the host's softmax. Z is not summed but taken from the mean and the variance of the
scores (`image_mass`), which two moments of the keys give. MM-EDiT (arXiv 2503.16726) is the same division of labour.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_flux import FluxAttention
from torch import Tensor

from zoo.mixers import Context
from zoo.mixers.context import Rotation
from zoo.models.diffusers.attention import DiffusionSite, norm_heads
from zoo.models.timm.attention import split_heads

Tokens = tuple[Tensor, Tensor, Tensor]  # q, k, v [B, N, H, D]
EXTRA = 8  # channels added to a head, a multiple of 8 as the fast kernels want


def image_mass(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """log of an estimate of sum_j exp(scale q.k_j) over the N keys: [B, N, H, D] each -> [B, N, H, 1].

    In float32 at least.

    With m and c the mean and variance of the scores, log N + m + c / 2 is exact for Gaussian scores and many keys as
    long as c <= 2 log N; beyond, single keys dominate and it is m + sqrt(2 c log N) (random energy model: Derrida,
    Phys. Rev. B 24, 2613, 1981). Both branches and their slopes agree where they meet.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(dtype) * scale, k.to(dtype)
    mean = k.mean(1, keepdim=True)
    keys = (k - mean).transpose(1, 2)  # [B, H, N, D]
    moment = keys.mT @ keys / k.shape[1]
    variance = ((q.transpose(1, 2) @ moment).transpose(1, 2) * q).sum(-1, keepdim=True)
    log_n = torch.full((), k.shape[1], dtype=dtype, device=k.device).log()  # a tensor: one graph serves every N
    frozen = (2 * log_n * variance.clamp(min=2 * log_n)).sqrt()
    return (q * mean).sum(-1, keepdim=True) + torch.where(variance < 2 * log_n, log_n + variance / 2, frozen)


def join_text(q: Tensor, k: Tensor, o: Tensor, text_k: Tensor, text_v: Tensor) -> Tensor:
    """Image queries q: softmax over the text keys and one more key, which stands for the image and has the value o.

    All [B, N, H, D]; k are the image keys, of which only the mass counts. The extra key has another score for each
    query, so that it goes through channels of its own: q' = [q, log Z / s], k' = [k, 0] for text and [0, 1] for it.
    """
    scale = q.shape[-1] ** -0.5
    score = image_mass(q, k, scale) / scale
    high = score.to(q.dtype)
    low = (score - high.to(score.dtype)).to(q.dtype)  # what the type of q rounded away
    queries = torch.cat([q, high, low, q.new_zeros(*q.shape[:3], EXTRA - 2)], dim=-1)
    keys, values = (F.pad(t, (0, EXTRA, 0, 0, 0, 1)) for t in (text_k, text_v))  # one more token, EXTRA more channels
    unit = torch.zeros_like(keys[:, -1:])
    unit[..., q.shape[-1] : q.shape[-1] + 2] = 1
    keys = torch.cat([keys[:, :-1], unit], dim=1)
    values = torch.cat([values[:, :-1], unit], dim=1)
    out = attend(queries, keys, values, scale)
    width = q.shape[-1]
    return out[..., :width] + out[..., width : width + 1] * o


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Softmax attention of [B, N, H, D]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


class JointSite(DiffusionSite):
    """What SD3 and Flux share: the division of a joint attention."""

    def joint(
        self,
        image: Tokens,
        text: Tokens,
        x: Tensor,
        *,
        text_first: bool,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(o of the image tokens, o of the text tokens), [B, N, H, D] each.

        x: hidden states of the image tokens. rotary: (cos, sin) [N, D] of all tokens in the host's order.
        Raises ValueError for a mask that the mixer cannot honour.
        """
        n = text[0].shape[1]
        ctx = Context(x=x, grid=self.grid, mask=mask)
        if self.mixer_name == "softmax":
            parts = (text, image) if text_first else (image, text)
            q, k, v = (torch.cat(pair, dim=1) for pair in zip(*parts, strict=True))
            o = self.mixer(q, k, v, replace(ctx, rotate=rotation(rotary, q.shape[-1])))
            return (o[:, n:], o[:, :n]) if text_first else (o[:, : o.shape[1] - n], o[:, o.shape[1] - n :])
        turn_text, turn = (rotation(rows, image[0].shape[-1]) for rows in split_rows(rotary, n, text_first))
        o = self.mixer(*image, replace(ctx, rotate=turn)).to(image[0].dtype)
        q, k, text_q, text_k = *image[:2], *text[:2]
        if turn is not None and turn_text is not None:
            q, k, text_q, text_k = turn(q), turn(k), turn_text(text_q), turn_text(text_k)
        text_o = attend(text_q, torch.cat([text_k, k], dim=1), torch.cat([text[2], image[2]], dim=1))
        return join_text(q, k, o, text_k, text[2]), text_o


def split_rows(rotary: tuple[Tensor, Tensor] | None, n: int, text_first: bool) -> Any:
    """The rows of a rotary embedding that belong to the n text tokens and to the image tokens; None without."""
    if rotary is None:
        return None, None
    first, last = zip(*((t[:n], t[n:]) if text_first else (t[:-n], t[-n:]) for t in rotary), strict=True)
    return (first, last) if text_first else (last, first)


def rotation(rotary: tuple[Tensor, Tensor] | None, width: int) -> Rotation | None:
    """A rotary embedding (cos, sin) [N, D] as a function [B, N, H, W] -> [B, N, H, W]; None without `rotary`.

    W is `width` = D or a multiple of it (feature maps that widen): each D channels are rotated alike. Channels 2 i and
    2 i + 1 form a pair, rotated in float32.
    """
    if rotary is None:
        return None
    cos, sin = (t[None, :, None, None] for t in rotary)  # [1, N, 1, 1, D]

    def rotate(t: Tensor) -> Tensor:
        parts = t.unflatten(-1, (-1, width))
        even, odd = parts.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-odd, even], dim=-1).flatten(-2)
        return (parts.float() * cos + turned.float() * sin).to(t.dtype).flatten(-2)

    return Rotation(rotate, lambda: (rotary[0][:, ::2], rotary[1][:, ::2]))


class SD3Site(JointSite, Attention):
    """Site in the joint attention of SD3: image tokens first, the text projected by weights of its own."""

    processors = ("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0")

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor]:
        """[B, N, C] and text [B, M, C] -> the same. Raises ValueError for a mask and unknown arguments."""
        self.refuse(arguments)
        if attention_mask is not None or encoder_hidden_states is None:
            raise ValueError("the joint attention of SD3 takes text tokens and no attention mask")
        text_x = encoder_hidden_states
        x = self.placed(hidden_states, 0)
        q, k, v = (split_heads(t, self.heads) for t in self.project(x))
        added = (self.add_q_proj, self.add_k_proj, self.add_v_proj)
        text = self.to_added_qkv(text_x).chunk(3, dim=-1) if self.fused else [proj(text_x) for proj in added]
        text_q, text_k, text_v = (split_heads(t, self.heads) for t in text)
        image = norm_heads(self.norm_q, q), norm_heads(self.norm_k, k), v
        texts = norm_heads(self.norm_added_q, text_q), norm_heads(self.norm_added_k, text_k), text_v
        o, text_o = (t.to(q.dtype) for t in self.joint(image, texts, x, text_first=False))
        text_o = text_o.flatten(2)
        return self.output(o), text_o if self.context_pre_only else self.to_add_out(text_o)


class FluxSite(JointSite, FluxAttention):
    """Site in both kinds of blocks of Flux: text tokens first, rotary embedding on all tokens.

    Blocks of the first kind pass the text apart, with weights of its own. Those of the second kind pass all tokens in
    one tensor, the first `prefix` of which are text.
    """

    processors = ("FluxAttnProcessor",)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        **arguments: Any,
    ) -> Any:
        """[B, N, C] (and text [B, M, C]) -> the same. Raises ValueError for a mask that the mixer cannot honour."""
        self.refuse(arguments)
        text_x = encoder_hidden_states
        x = self.placed(hidden_states, self.prefix if text_x is None else 0)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.project(x))
        tokens = self.norm_q(q), self.norm_k(k), v
        if text_x is None:
            n = self.prefix
            text, image = tuple(t[:, :n] for t in tokens), tuple(t[:, n:] for t in tokens)
            o, text_o = self.joint(image, text, x[:, n:], text_first=True, rotary=image_rotary_emb, mask=attention_mask)
            return torch.cat([text_o, o], dim=1).flatten(2).to(q.dtype)
        added = (self.add_q_proj, self.add_k_proj, self.add_v_proj)
        flat = self.to_added_qkv(text_x).chunk(3, dim=-1) if self.fused else [proj(text_x) for proj in added]
        text_q, text_k, text_v = (t.unflatten(-1, (-1, self.head_dim)) for t in flat)
        text = self.norm_added_q(text_q), self.norm_added_k(text_k), text_v
        both = self.joint(tokens, text, x, text_first=True, rotary=image_rotary_emb, mask=attention_mask)
        o, text_o = (t.to(q.dtype).contiguous() for t in both)  # as the host, or bfloat16 products round differently
        return self.output(o), self.to_add_out(text_o.flatten(2))

    @property
    def fused(self) -> bool:
        return self.fused_projections
