"""Sites in joint attention of text and image tokens: SD3 and Flux.

Adaptive `multipole` without a gate, a norm or blocks computes all of it, exactly for text queries and text keys unless
it has a branch, gains or depthwise convolutions. With other mixers, only image-to-image attention is replaced.
Attention from or to text remains softmax; its cost is linear in the number of image tokens.

    text queries    o = softmax over all keys, as in the host
    image queries   o = (sum_text e^(s q.k) v + Z o_mixer) / (sum_text e^(s q.k) + Z)

o_mixer is the mixer over the image tokens only; it approximates the softmax average over the image keys. Z is their
partition function sum_image e^(s q.k). Z is not summed but estimated from the mean and the variance of
the scores (`estimate_log_partition`), which follow from two moments of the keys. MM-EDiT (arXiv 2503.16726) divides the
attention in the same way.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.mixers import Context
from zoo.mixers.context import Rotation
from zoo.models.diffusers.attention import DiffusionSite, rotate_pairs

Tokens = tuple[Tensor, Tensor, Tensor]  # q, k, v [B, N, H, D]
Tables = tuple[Tensor, Tensor]  # cos, sin [N, D]
SCORE_CHANNELS = 8  # channels added per head; fast kernels need a multiple of 8


def estimate_log_partition(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Estimate log sum_j exp(scale q.k_j) over the N keys in at least float32: [B, N, H, D] each -> [B, N, H, 1].

    With mean m and variance c of the scores, the result is log N + m + c / 2 for c <= 2 log N, exact for Gaussian
    scores and many keys. For larger c single keys dominate, and it is m + sqrt(2 c log N) (random energy model:
    Derrida, Phys. Rev. B 24, 2613, 1981). Both branches and their derivatives agree at c = 2 log N.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(dtype) * scale, k.to(dtype)
    mean = k.mean(1, keepdim=True)
    keys = (k - mean).transpose(1, 2)  # [B, H, N, D]
    moment = keys.mT @ keys / k.shape[1]
    variance = ((q.transpose(1, 2) @ moment).transpose(1, 2) * q).sum(-1, keepdim=True)
    log_n = torch.full((), k.shape[1], dtype=dtype, device=k.device).log()  # a tensor: one graph serves every N
    dominated = (2 * log_n * variance.clamp(min=2 * log_n)).sqrt()
    return (q * mean).sum(-1, keepdim=True) + torch.where(variance < 2 * log_n, log_n + variance / 2, dominated)


def attend_text_and_image(q: Tensor, k: Tensor, o: Tensor, text_k: Tensor, text_v: Tensor) -> Tensor:
    """Compute softmax attention of image queries to the text keys and to one extra key, which represents the image.

    All tensors are [B, N, H, D]. o: output of the mixer, the value of the extra key. k: image keys, only for log Z.
    The score of the extra key, log Z, depends on the query, so it is computed in extra channels: q' = [q, log Z / s],
    k' = [k, 0] for text keys and [0, 1] for the extra key.
    """
    scale = q.shape[-1] ** -0.5
    score = estimate_log_partition(q, k, scale) / scale
    high = score.to(q.dtype)
    low = (score - high.to(score.dtype)).to(q.dtype)  # rounding error of `score` in the dtype of q
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
    """Compute softmax attention of q, k, v [B, N, H, D]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


def split_text(tokens: Tokens, n: int) -> tuple[Tokens, Tokens]:
    """Split q, k, v [B, N, H, D] into the n text tokens, which come first, and the image tokens."""
    q, k, v = tokens
    return (q[:, :n], k[:, :n], v[:, :n]), (q[:, n:], k[:, n:], v[:, n:])


class JointSite(DiffusionSite):
    """Base class of the sites in joint attention of SD3 and Flux."""

    def joint(
        self,
        image: Tokens,
        text: Tokens,
        x: Tensor,
        *,
        text_first: bool,
        rotary: Tables | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of the image and the text tokens, [B, N, H, D] each.

        x: hidden states of the image tokens. rotary: (cos, sin) of all tokens in the order of the host. Raises
        ValueError for a mask that the mixer does not support.
        """
        n = text[0].shape[1]
        ctx = Context(x=x, grid=self.grid, mask=mask)
        if self.mixer.takes_text:
            ordered = (text, image) if text_first else (image, text)
            q, k, v = (torch.cat(pair, dim=1) for pair in zip(*ordered, strict=True))
            prefix, suffix = (n, 0) if text_first else (0, n)
            ctx = replace(ctx, rotate=joint_rotation(rotary), prefix=prefix, suffix=suffix)
            o = self.mixer(q, k, v, ctx).to(q.dtype)
            return (o[:, n:], o[:, :n]) if text_first else (o[:, : o.shape[1] - n], o[:, o.shape[1] - n :])
        rotate_text, rotate = map(joint_rotation, split_tables(rotary, n, text_first))
        o = self.mixer(*image, replace(ctx, rotate=rotate)).to(image[0].dtype)
        q, k, text_q, text_k = *image[:2], *text[:2]
        if rotate is not None and rotate_text is not None:
            q, k, text_q, text_k = rotate(q), rotate(k), rotate_text(text_q), rotate_text(text_k)
        text_o = attend(text_q, torch.cat([text_k, k], dim=1), torch.cat([text[2], image[2]], dim=1))
        return attend_text_and_image(q, k, o, text_k, text[2]), text_o


def split_tables(rotary: Tables | None, n: int, text_first: bool) -> tuple[Tables | None, Tables | None]:
    """Split a rotary embedding into the tables of the n text tokens and of the image tokens."""
    if rotary is None:
        return None, None
    cos, sin = rotary
    text, image = (slice(n), slice(n, None)) if text_first else (slice(-n, None), slice(-n))
    return (cos[text], sin[text]), (cos[image], sin[image])


def joint_rotation(rotary: Tables | None) -> Rotation | None:
    """Return a rotary embedding (cos, sin) as a `Rotation` by `rotate_pairs`; None without `rotary`."""
    if rotary is None:
        return None
    cos, sin = (t[None, :, None, None] for t in rotary)  # [1, N, 1, 1, D]
    return Rotation(partial(rotate_pairs, cos=cos, sin=sin), lambda: (rotary[0][:, ::2], rotary[1][:, ::2]))
