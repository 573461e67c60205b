"""Sequences of a call (a padding mask, or packed sequences), and its tokens by heads.

    key_padding_mask [B, N] bool   True for real tokens; padded tokens are neither read nor written
    cu_seqlens [S + 1] int32       sequence i is tokens cu_seqlens[i] .. cu_seqlens[i + 1] - 1 of a batch of one

`Sequences.padded` pads packed sequences and `packed` reverses it: the torch forms support padded sequences only.

Heads [B, Hk, G, N, D]: query head h = i * G + g reads key head i. Keys and values have a group axis of 1 and broadcast,
so everything that depends on keys alone is computed once per key head. To heads and back is one copy each way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Sequences(NamedTuple):
    """Sequences of a call: a mask, or cu_seqlens with the length of the longest sequence. The last field holds
    precomputed `tables`, or None."""

    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    told: tuple[Tensor | None, ...] | None = None

    def sizes(self, q: Tensor) -> tuple[int, int, int]:
        """Return (number of sequences, tokens of the longest one, heads) for q [B, N, H, D]."""
        if self.cu_seqlens is None:
            return q.shape[0], q.shape[1], q.shape[2]
        return self.cu_seqlens.shape[0] - 1, self.max_seqlen, q.shape[2]

    def tables(self, heads: int, scales: Callable[[Tensor], Tensor]) -> tuple[Tensor | None, ...]:
        """Return the tables that kernels read, None for those that do not apply.

        Packed sequences: (first token, length) [S, 2] int64. Mask or packed: (number of real tokens, scale of a
        moment) [B * H, 2] float32. Mask: which tokens are real [B, N] uint8. scales: returns the scales for numbers of
        tokens.
        """
        if self.told is not None:
            return self.told
        if self.mask is None and self.cu_seqlens is None:
            return None, None, None
        spans, keep = None, None
        if self.cu_seqlens is not None:
            lengths = self.cu_seqlens.diff()
            spans = torch.stack([self.cu_seqlens[:-1], lengths], 1).long()
        else:
            assert self.mask is not None
            keep = self.mask.contiguous().view(torch.uint8)
            lengths = keep.sum(1)
        n = lengths.clamp(min=1).float()
        return spans, torch.stack([n, scales(n)], 1)[:, None].repeat(1, heads, 1), keep

    def padded(self, *tokens: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return tokens [B, N, ...], packed ones as [S, rows, ...] with rows for the longest sequence, and the mask of
        real tokens [B, N] or [S, rows]."""
        if self.cu_seqlens is None:
            return tokens, self.mask
        cu, n = self.cu_seqlens, tokens[0].shape[1]
        row = torch.arange(torch.sym_min(self.max_seqlen, n), device=cu.device)  # symbolic while compiling
        token = (cu[:-1, None].long() + row).clamp(max=n - 1)  # padding repeats other tokens
        return tuple(x[0][token] for x in tokens), row < cu.diff()[:, None]

    def packed(self, y: Tensor, n_tokens: int) -> Tensor:
        """Undo `padded` for a tensor of n_tokens tokens."""
        if self.cu_seqlens is None:
            return y
        token, ends = torch.arange(n_tokens, device=y.device), self.cu_seqlens[1:].long().contiguous()
        sequence = torch.searchsorted(ends, token, right=True).clamp(max=ends.shape[0] - 1)
        row = (token - self.cu_seqlens.long()[sequence]).clamp(max=y.shape[1] - 1)
        return y[sequence, row][None]


WHOLE = Sequences()  # every token of a batch row is one sequence


def counts(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the number of real tokens per sequence, at least 1, [B, 1, 1, 1, 1]."""
    return mask.sum(1).clamp(min=1).to(dtype)[:, None, None, None, None]


def real(x: Tensor, mask: Tensor | None) -> Tensor:
    """Set padded tokens of x [B, N, ...] to zero, whatever their values (NaN too)."""
    return x if mask is None else x.where(mask.unflatten(1, (-1, *[1] * (x.dim() - 2))), 0)


def query_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v [B, N, ., .] as [B, H, N, .]: zero at padded tokens, and with key heads repeated."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (real(x, mask).transpose(1, 2) for x in (q, k, v))
    return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def to_heads(x: Tensor, n_key_heads: int, dtype: torch.dtype) -> Tensor:
    """Return x [B, N, Hk * G, D] as [B, Hk, G, N, D], contiguous, in `dtype`, with one pass over memory."""
    view = x.unflatten(2, (n_key_heads, x.shape[2] // n_key_heads)).permute(0, 2, 3, 1, 4)
    return torch.empty(view.shape, dtype=dtype, device=x.device).copy_(view)


def to_tokens(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return y [B, Hk, G, N, D] as [B, N, Hk * G, D], contiguous, in `dtype`."""
    view = y.permute(0, 3, 1, 2, 4)
    return torch.empty(view.shape, dtype=dtype, device=y.device).copy_(view).flatten(2, 3)


def live_heads(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x [B, Hk, G, N, .] with zeros at tokens outside `mask` [B, N]."""
    return x if mask is None else x.where(mask[:, None, None, :, None], 0)
