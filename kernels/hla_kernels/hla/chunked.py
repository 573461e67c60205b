"""One causal stage in chunks of C tokens: C x C products within chunks, a D x Dv state between.

    LA(q, k, v)_t = q_t' H_t,    H_t = gamma H_{t-1} + k_t v_t'

Inside chunk c, with H the state entering it and i the position in the chunk: o = (Gamma o (Q K')) V + gamma^(i+1) Q H.
The states entering the chunks are a cumulative sum of the sums per chunk. With decay (gamma^C per chunk),
`Chunks.decayed_sum` is hierarchical: sums inside groups of M chunks, then over the totals of M groups, and so on. Each
level uses one M x M matrix of powers, and there are log_M(number of chunks) levels, so no matrix grows with N. There is
no loop over tokens, chunks or groups, and time and memory are linear in N. The last chunk is padded with zeros.

Frame-causal (`Chunks.frame`): a chunk is a frame, whose tokens read the state after it, o = Q H. A decay is per frame.

Shapes: q [B, Hk, G, c, C, D], k [B, Hk, 1, c, C, D], v [B, Hk, 1 or G, c, C, Dv], states [B, Hk, 1 or G, D, Dv].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
GROUP = 16  # M; with 64 each level would pad short sequences to more chunks than they have


class Chunks:
    """Division of N tokens into chunks, and powers of gamma. log_gamma: [1, Hk, 1 or G, 1, 1] or None."""

    def __init__(self, n: int, log_gamma: Tensor | None, like: Tensor, frame: int = 0) -> None:
        # one compiled graph (of a call with a state) must serve every N: the chunk size is constant, and two spare
        # chunks avoid the special case of one chunk. Eager calls, and decoding with N = 1, pad to whole chunks only
        self.spare = 2 if torch.compiler.is_compiling() and n != 1 and not frame else 0
        self.size, self.frame = frame or (CHUNK if self.spare else min(CHUNK, n)), frame > 0
        real = (n + self.size - 1) // self.size
        self.n, self.last, self.count = n, n - (real - 1) * self.size, real + self.spare
        self.log_gamma = None if log_gamma is None else log_gamma.to(like.dtype)
        self.i = torch.arange(self.size, device=like.device)
        self.within = like if frame else self.power(self.i[:, None] - self.i[None, :], like)

    def power(self, exponent: Tensor, like: Tensor) -> Tensor:
        """Return gamma^exponent where exponent >= 0, else 0; [a, b] -> [a, b], with decay [1, Hk, 1 or G, a, b].

        Large exponents underflow to 0, and so does their gradient: log gamma is finite (`checks`), never 0 * inf.
        """
        seen = exponent >= 0
        if self.log_gamma is None:
            return seen.to(like.dtype)
        return torch.where(seen, (self.log_gamma * exponent.clamp(min=0)).exp(), 0)

    def rows(self, shift: int, like: Tensor) -> Tensor | None:
        """Return gamma^(i + 1 - shift) [.., 1, C, 1], the decay of the entering state until token i of the chunk."""
        return None if self.log_gamma is None else self.power(self.i[:, None] + 1 - shift, like).unsqueeze(-3)

    def columns(self, length: int, like: Tensor) -> Tensor:
        """Return gamma^(length - 1 - i) [.., C, 1], the decay of token i after `length` tokens; 0 if i >= length."""
        return self.power(length - 1 - self.i[:, None], like)

    def cut(self, x: Tensor) -> Tensor:
        """[B, Hk, G, N, D] -> [B, Hk, G, c, C, D]."""
        padding = self.count * self.size - self.n
        if self.spare or padding:  # `spare` first: a compiled graph must not branch on N
            x = F.pad(x, (0, 0, 0, padding))
        return x.view(*x.shape[:3], self.count, self.size, x.shape[-1])

    def join(self, x: Tensor) -> Tensor:
        """[B, Hk, G, c, C, D] -> [B, Hk, G, N, D]."""
        return x.flatten(3, 4).narrow(3, 0, self.n)

    def entering(self, own: Tensor, carry: Tensor | None) -> Tensor:
        """Return the states entering all chunks from the sums per chunk: [B, Hk, g, c, D, E] -> the same shape."""
        first = torch.zeros_like(own[:, :, :, :1]) if carry is None else carry.unsqueeze(3)
        if first.shape[2] != own.shape[2]:
            own, first = (x.expand(-1, -1, max(own.shape[2], first.shape[2]), -1, -1, -1) for x in (own, first))
        x = torch.cat([first, own[:, :, :, :-1]], 3)
        if self.log_gamma is None:
            return x.cumsum(3)
        return self.decayed_sum(x.flatten(4), self.size, self.levels()).unflatten(-1, x.shape[4:])

    def inclusive(self, own: Tensor, carry: Tensor | None) -> Tensor:
        """Return the states after all frames from the sums per frame, shapes as in `entering`."""
        if carry is not None:
            groups = max(carry.shape[2], own.shape[2])
            own = torch.cat([x.expand(-1, -1, groups, -1, -1, -1) for x in (carry.unsqueeze(3), own)], 3)
        x = own.cumsum(3)
        if self.log_gamma is not None:
            x = self.decayed_sum(own.flatten(4), 1, self.levels()).unflatten(-1, own.shape[4:])
        return x if carry is None else x[:, :, :, 1:]

    def levels(self) -> int:
        """Return the number of levels of groups until at most M totals are left. While compiling, where no branch may
        depend on N, it is 2: the last matrix then has N / (C M^2) = N / 16384 rows, few for any N that fits into
        memory."""
        if self.spare:
            return 2
        levels, reach = 0, GROUP
        while reach < self.count:
            levels, reach = levels + 1, reach * GROUP
        return levels

    def decayed_sum(self, x: Tensor, step: int, levels: int) -> Tensor:
        """Return y_c = sum_{j<=c} gamma^(step (c-j)) x_j over c: [B, Hk, g, c, E] -> the same shape.

        y = (sum inside the group) + gamma^(step (i+1)) (sum over all earlier groups, from the totals of groups).
        """
        count = x.shape[3]
        i = torch.arange(GROUP if levels else count, device=x.device)
        inside = self.power(step * (i[:, None] - i[None, :]), x)
        if not levels:
            return inside @ x
        groups = (count + GROUP - 1) // GROUP + self.spare
        padding = groups * GROUP - count
        if self.spare or padding:
            x = F.pad(x, (0, 0, 0, padding))
        y = inside.unsqueeze(-3) @ x.view(*x.shape[:3], groups, GROUP, x.shape[-1])
        before = self.decayed_sum(y[:, :, :, :-1, -1], step * GROUP, levels - 1)  # after each group but the last
        before = F.pad(before, (0, 0, 1, 0)).unsqueeze(-2)
        y = y + self.power(step * (i[:, None] + 1), x).unsqueeze(-3) * before
        return y.flatten(3, 4).narrow(3, 0, count)

    def leaving(self, k: Tensor, v: Tensor, entering: Tensor) -> Tensor:
        """Return the state after the last real token, [B, Hk, g, D, E], without the padding of the last chunk."""
        k, v, state = (x[:, :, :, -1 - self.spare] for x in (k, v, entering))
        k = k * self.columns(self.last, k)
        if self.log_gamma is not None:
            state = state * (self.log_gamma * self.last).exp()
        return state + k.mT @ v


def stage(
    q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, carry: Tensor | None = None, strict: bool = False,
    want_state: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return (LA(q, k, v), state after the last token or None); `carry` is the state before the first token.

    strict: sum_{j<t} gamma^(t-1-j) (q_t.k_j) v_j instead, which reads the state before token t; carry and states are
    the same.
    """
    if chunks.frame:
        states = chunks.inclusive(k.mT @ v, carry)
        return q @ states, states[:, :, :, -1] if want_state else None
    kept = k if chunks.log_gamma is None else k * chunks.columns(chunks.size, k).unsqueeze(-3)
    own = kept.mT @ v
    entering = chunks.entering(own, carry)
    within = chunks.within
    if strict:
        within = chunks.power(chunks.i[:, None] - chunks.i[None, :] - 1, k)
    if chunks.log_gamma is not None:
        within = within.unsqueeze(-3)
    rows = chunks.rows(int(strict), q)
    y = ((q @ k.mT) * within) @ v + (q if rows is None else q * rows) @ entering
    return y, chunks.leaving(k, v, entering) if want_state else None


def running_sum(
    x: Tensor, chunks: Chunks, carry: Tensor | None, want_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return sum_{j<=t} gamma^(t-j) x_j [B, Hk, g, c, C, D], the stage with q = k = 1; carry and state are
    [B, Hk, g, 1, D]."""
    ones = torch.ones_like(x[..., :1])
    return stage(ones, ones, x, chunks, carry, want_state=want_state)
