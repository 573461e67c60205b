"""Sequences of a call: a padding mask, or packed sequences.

    key_padding_mask [B, N] bool   True for real tokens; padded tokens are neither read nor written
    cu_seqlens [S + 1] int32       sequence i is tokens cu_seqlens[i] .. cu_seqlens[i + 1] - 1 of a batch of one

`unpack` pads packed sequences and `pack` reverses it: the torch forms support padded sequences only.
"""

from __future__ import annotations

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

    def tables(
        self, heads: int, scale: float | None, q_scale: float, of_differences: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Return the tables that kernels read, None for those that do not apply.

        Packed sequences: (first token, length) [S, 2] int64. Mask or packed: (number of real tokens, scale of a
        moment) [B * H, 2] float32. Mask: which tokens are real [B, N] uint8. of_differences: moments of a single token
        are zero.
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
        s = q_scale / n if scale is None else torch.full_like(n, scale)
        s = s * (n > 1) if of_differences else s
        return spans, torch.stack([n, s], 1)[:, None].repeat(1, heads, 1), keep


WHOLE = Sequences()  # every token of a batch row is one sequence


def rows_of(max_seqlen: int, n_tokens: int) -> int:
    """Return the length of the padded sequences: max_seqlen, at most the number of all tokens."""
    return torch.sym_min(max_seqlen, n_tokens)  # type: ignore[return-value]  # symbolic while compiling


def live_rows(cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Return which rows of the padded sequences are tokens, [S, max_seqlen] bool."""
    lengths = cu_seqlens.diff()
    return torch.arange(max_seqlen, device=cu_seqlens.device) < lengths[:, None]


def unpack(x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Convert packed [1, T, ...] to padded [S, max_seqlen, ...]; padding repeats other tokens."""
    rows = cu_seqlens[:-1, None].long() + torch.arange(max_seqlen, device=cu_seqlens.device)
    return x[0][rows.clamp(max=x.shape[1] - 1)]


def pack(y: Tensor, cu_seqlens: Tensor, n_tokens: int) -> Tensor:
    """Pack padded [S, max_seqlen, ...] to [1, T, ...], the tokens of all sequences."""
    token = torch.arange(n_tokens, device=cu_seqlens.device)
    ends = cu_seqlens[1:].long().contiguous()
    sequence = torch.searchsorted(ends, token, right=True).clamp(max=ends.shape[0] - 1)
    row = (token - cu_seqlens.long()[sequence]).clamp(max=y.shape[1] - 1)
    return y[sequence, row][None]


def counts(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the number of real tokens per sequence, at least 1, [B, 1, 1, 1, 1]."""
    return mask.sum(1).clamp(min=1).to(dtype)[:, None, None, None, None]


def real(x: Tensor, mask: Tensor | None) -> Tensor:
    """Set padded tokens of x [B, N, ...] to zero, whatever their values (NaN too)."""
    return x if mask is None else x.where(mask.unflatten(1, (-1, *[1] * (x.dim() - 2))), 0)
