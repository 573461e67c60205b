"""Sites in joint attention, where text and image tokens attend to each other: SD3 and Flux.

Only the image-to-image part becomes linear; whatever involves text stays softmax, at a cost linear in the number of
image tokens (text is short):

    text queries    o = softmax over all keys, as in the host
    image queries   o = (sum_text e^(s q.k) v + Z o_mixer) / (sum_text e^(s q.k) + Z)

o_mixer is the mixer over the image tokens alone, which stands for the host's average over the image keys, and Z for
their weight sum_image e^(s q.k) in the host's softmax. Z is not summed but estimated from the mean and the variance of
the scores (`estimate_log_partition`), which follow from two moments of the keys. MM-EDiT (arXiv 2503.16726) divides the
attention in the same way.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.mixers import Context
from zoo.mixers.context import Rotation
from zoo.models.diffusers.attention import DiffusionSite

Tokens = tuple[Tensor, Tensor, Tensor]  # q, k, v [B, N, H, D]
SCORE_CHANNELS = 8  # channels added to a head, a multiple of 8 as the fast kernels want


def estimate_log_partition(q: Tensor, k: Tensor, scale: float) -> Tensor:
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


def attend_text_and_image(q: Tensor, k: Tensor, o: Tensor, text_k: Tensor, text_v: Tensor) -> Tensor:
    """Image queries q: softmax over the text keys and one more key, which stands for the image and has the value o.

    All [B, N, H, D]; k are the image keys, of which only the mass counts. The extra key has another score for each
    query, so that it goes through channels of its own: q' = [q, log Z / s], k' = [k, 0] for text and [0, 1] for it.
    """
    scale = q.shape[-1] ** -0.5
    score = estimate_log_partition(q, k, scale) / scale
    high = score.to(q.dtype)
    low = (score - high.to(score.dtype)).to(q.dtype)  # what the type of q rounded away
    queries = torch.cat([q, high, low, q.new_zeros(*q.shape[:3], SCORE_CHANNELS - 2)], dim=-1)
    keys, values = (F.pad(t, (0, SCORE_CHANNELS, 0, 0, 0, 1)) for t in (text_k, text_v))
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
            o = self.mixer(q, k, v, replace(ctx, rotate=joint_rotation(rotary, q.shape[-1])))
            return (o[:, n:], o[:, :n]) if text_first else (o[:, : o.shape[1] - n], o[:, o.shape[1] - n :])
        turn_text, turn = (joint_rotation(rows, image[0].shape[-1]) for rows in split_rows(rotary, n, text_first))
        o = self.mixer(*image, replace(ctx, rotate=turn)).to(image[0].dtype)
        q, k, text_q, text_k = *image[:2], *text[:2]
        if turn is not None and turn_text is not None:
            q, k, text_q, text_k = turn(q), turn(k), turn_text(text_q), turn_text(text_k)
        text_o = attend(text_q, torch.cat([text_k, k], dim=1), torch.cat([text[2], image[2]], dim=1))
        return attend_text_and_image(q, k, o, text_k, text[2]), text_o


def split_rows(rotary: tuple[Tensor, Tensor] | None, n: int, text_first: bool) -> Any:
    """The rows of a rotary embedding that belong to the n text tokens and to the image tokens; None without."""
    if rotary is None:
        return None, None
    first, last = zip(*((t[:n], t[n:]) if text_first else (t[:-n], t[-n:]) for t in rotary), strict=True)
    return (first, last) if text_first else (last, first)


def joint_rotation(rotary: tuple[Tensor, Tensor] | None, width: int) -> Rotation | None:
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
