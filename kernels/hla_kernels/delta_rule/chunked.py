"""The recurrence by chunks of tokens, or over frames: one step of the state for each.

Within a chunk, rows of a and b are ordered by token, rank fastest. gi and ge are the inclusive and exclusive cumulative
sums of log_f, and <x_i, y_j> = sum_d x_id y_jd exp(e_id - gi_jd) with e = gi for queries, ge for b.

    (I + <b, a>) Z = (b exp(ge)) S + <b, k> V                         pairs i > j, by forward substitution: Z = W S + U
    O = (q exp(gi)) S + <q, k> V - <q, a> Z                           pairs i >= j
    S <- exp(gi_C) S + (k exp(gi_C - gi))' V - (a exp(gi_C - gi))' Z

Z_t = B_t' S_{t-1} is what token t reads. For accuracy, every exponent is a sum of terms <= 0: decays between tokens in
different parts of a chunk are split at the start of the later part, decays within a part are computed per pair.

Tokens of a frame act on the state before the frame and read the state after it:

    S_f = Mean_t ((D_t - A_t B_t') S_{f-1} + K_t V_t')    o_t = S_f' q_t      over the n tokens t of frame f

This is one step per frame, with D = Mean_t D_t and the columns of all tokens in A / n, B, K / n and V. A mean of
transitions that enlarge nothing enlarges nothing. Frames of one token are the recurrence over tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64  # tokens
PART = 16  # tokens per part of a chunk; inside it, per-channel decays are computed for each pair of tokens


class Chunks(NamedTuple):
    """Tokens cut into c chunks of C: q [B, H, c, C, 1, D], k and v [B, H, c, C, s, .], a and b [B, H, c, C, r, D], and
    log_f [B, H, c, C, 1 or D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    log_f: Tensor


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the same as `reference` in chunks, for any number of tokens."""
    n = q.shape[2]
    x = _cut(q, k, v, log_f, a, b)
    left = _after(x.log_f).exp().unsqueeze(-2)  # decay of each token until the end of its chunk
    written = _rows(x.k * left).mT @ _rows(x.v)  # [B, H, c, D, Dv]
    kept = x.log_f.sum(-2).exp().unsqueeze(-1)
    reads = _reads(x) if a.shape[3] else None
    states, read, state = _states(written, kept, state, _rows(x.a * left), reads)
    o = _rows(x.q * x.log_f.cumsum(-2).exp().unsqueeze(-2)) @ states
    o = o + _scores(x.q, x.k, x.log_f, False) @ _rows(x.v)
    if read is not None:
        o = o - _scores(x.q, x.a, x.log_f, False) @ read
    return o.flatten(2, 3)[:, :, :n], state


def _cut(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor) -> Chunks:
    """Cut the tokens into chunks, padded with zeros, which neither read, write nor decay anything."""
    more = -q.shape[2] % CHUNK

    def cut(x: Tensor) -> Tensor:
        zeros = x.new_zeros((*x.shape[:2], more, *x.shape[3:]))
        return torch.cat([x, zeros], 2).unflatten(2, (-1, CHUNK))

    return Chunks(cut(q).unsqueeze(-2), cut(k), cut(v), cut(a), cut(b), cut(log_f))


def _rows(x: Tensor) -> Tensor:
    """[.., C, r, D] -> [.., C r, D]."""
    return x.flatten(-3, -2)


def _reads(x: Chunks) -> tuple[Tensor, Tensor]:
    """Return (W, U): the tokens of a chunk read W S + U from the state S at its start."""
    system = _scores(x.b, x.a, x.log_f, True)  # a strict triangle of blocks r x r
    decayed = _rows(x.b * _before(x.log_f).exp().unsqueeze(-2))
    right = torch.cat([decayed, _scores(x.b, x.k, x.log_f, True) @ _rows(x.v)], -1)
    found = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    w, u = found.split([x.b.shape[-1], x.v.shape[-1]], -1)
    return w, u


def _states(
    written: Tensor, kept: Tensor, state: Tensor, erased: Tensor, reads: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the states at the start of all chunks [B, H, c, D, Dv], what their tokens read [B, H, c, C r, Dv] (None if
    r = 0), and the state after the last chunk. reads: (W, U) of `_reads`."""
    states, found = [], []
    for i in range(written.shape[2]):
        states.append(state)
        after = kept[:, :, i] * state + written[:, :, i]
        if reads is not None:
            found.append(reads[0][:, :, i] @ state + reads[1][:, :, i])
            after = after - erased[:, :, i].mT @ found[-1]
        state = after
    return torch.stack(states, 2), torch.stack(found, 2) if found else None, state


def _scores(x: Tensor, y: Tensor, log_f: Tensor, strict: bool) -> Tensor:
    """[.., C r, C s]: sum_d x_id y_jd exp(E_ijd) where i >= j, else 0; x [.., C, r, D], y [.., C, s, D].

    E_ij is the sum of log_f over the tokens after j, up to i; strict: before i, and i > j only.
    """
    if log_f.shape[-1] == 1:  # one decay for all channels
        decay = _between_tokens(log_f, strict).squeeze(-1).exp()
        return _rows(x) @ _rows(y).mT * _spread(decay, x.shape[-2], y.shape[-2])
    x, y, log_f = (t.unflatten(3, (-1, PART)) for t in (x, y, log_f))
    within = torch.einsum("...ird,...jsd,...ijd->...irjs", x, y, _between_tokens(log_f, strict).exp())
    found = _between_parts(x, y, log_f, strict)
    own = torch.eye(CHUNK // PART, dtype=torch.bool, device=x.device)[:, None, None, :, None, None]
    found = torch.where(own, within.unsqueeze(-3), found)  # [.., parts, 16, r, parts, 16, s]
    return found.flatten(-3).flatten(3, 5)


def _between_tokens(log_f: Tensor, strict: bool) -> Tensor:
    """Return the sums E [.., i, j, E] of `_scores` for log_f [.., C, E], minus infinity for pairs without a score."""
    size = log_f.shape[-2]
    pairs = torch.ones(size, size, dtype=torch.bool, device=log_f.device).tril(-1).unsqueeze(-1)
    sums = log_f.unsqueeze(-2).where(pairs, 0.0).cumsum(-3)  # no subtraction, hence no cancellation
    if not strict:
        pairs = pairs | torch.eye(size, dtype=torch.bool, device=log_f.device).unsqueeze(-1)
        return sums.masked_fill(~pairs, -torch.inf)
    before = torch.cat([torch.zeros_like(sums[..., :1, :, :]), sums[..., :-1, :, :]], -3)
    return before.masked_fill(~pairs, -torch.inf)


def _between_parts(x: Tensor, y: Tensor, log_f: Tensor, strict: bool) -> Tensor:
    """Return the scores [.., parts, 16, r, parts, 16, s] of x in a part with y in an earlier part, else 0."""
    parts = log_f.shape[3]
    since_start = _before(log_f) if strict else log_f.cumsum(-2)
    far_x = _rows(x * since_start.exp().unsqueeze(-2))  # [.., parts, 16 r, D]
    to_start = _after(log_f).unsqueeze(3) + _between_tokens(log_f.sum(-2), True).unsqueeze(-2)  # [.., i, j, 16, D]
    far_y = (y.unsqueeze(3) * to_start.exp().unsqueeze(-2)).flatten(4, 6)  # [.., parts, C s, D]
    return (far_x @ far_y.mT).unflatten(-2, (PART, -1)).unflatten(-1, (parts, PART, -1))


def _before(log_f: Tensor) -> Tensor:
    """Return the sum over the tokens before each token."""
    return torch.cat([torch.zeros_like(log_f[..., :1, :]), log_f[..., :-1, :]], -2).cumsum(-2)


def _after(log_f: Tensor) -> Tensor:
    """Return the sum over the tokens after each token."""
    return _before(log_f.flip(-2)).flip(-2)


def _spread(x: Tensor, r: int, s: int) -> Tensor:
    """Repeat each entry of [.., C, C] for r x s rows."""
    return x.repeat_interleave(r, -2).repeat_interleave(s, -1)


def framed(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor, state: Tensor, frame: int
) -> tuple[Tensor, Tensor]:
    """Compute the same as `reference` from one D x D transition per frame of `frame` tokens, a divisor of N."""
    q, k, v, log_f, a, b = (x.unflatten(2, (-1, frame)) for x in (q, k, v, log_f, a, b))
    kept = log_f.exp().mean(3).expand(-1, -1, -1, q.shape[-1])
    transition = torch.diag_embed(kept) - _rows(a).mT @ _rows(b) / frame  # [B, H, F, D, D]
    written, states = _rows(k).mT @ _rows(v) / frame, []
    for i in range(q.shape[2]):
        state = transition[:, :, i] @ state + written[:, :, i]
        states.append(state)
    return (q @ torch.stack(states, 2)).flatten(2, 3), state
