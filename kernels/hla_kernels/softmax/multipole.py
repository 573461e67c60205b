"""Multipole attention: exact for near tokens, others expanded around the mean key of their block.

Symbols. s_tj = s q_t.k_j: scores. b: a block of the token grid with n_b tokens and mean key k_b. a_tb = s q_t.k_b: mean
of s_tj over the block. r_tj = s_tj - a_tb for j in block b.

    near   w_tj = exp(s_tj)                 j within `radius` of t along every axis, or t or j not on the grid
    far    w_tj = exp(a_tb) f(r_tj)         f = 1, 1 + r or 1 + r + r^2 / 2 for degree 0, 1, 2: exp around a_tb
    o_t = sum_j w_tj v_j / sum_j w_tj

The r_tj of a block sum to zero, so with degree 1 a block without near tokens has the total weight n_b exp(a_tb), and
near tokens only increase it, since exp(r) >= 1 + r. The denominator is therefore positive. Single weights are positive
for degree 0 and 2, but not always for degree 1. Blocks of one token are exact. A radius as large as the grid gives
softmax. With one block, the far field is the expansion of softmax around uniform weights (`softmax.taylor` for degree
2).

The split into an exact near field and expansions of far groups is the fast multipole method's (Greengard and Rokhlin,
J. Comput. Phys. 73, 1987). Here the weights of all pairs are computed, 3 N^2 D multiplications per head, more than for
softmax, and there is no Triton form: `softmax.adaptive`, which has one, is closer to softmax with as many exact keys.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..blockmix.call import check_layout
from ..blockmix.layout import Layout, block_table
from ..checks import cast_tensors, check_finite, check_grid_tokens, check_sequences, is_count
from ..options import compute_dtype
from ..sequences import real
from .attention import SMALLEST, Heads, largest, to_layout

DEGREES = (0, 1, 2)
PAIRS = 2**25  # weights in memory at a time


class MultipoleCall(NamedTuple):
    """A checked call: tensors cast for autocast; grid, blocks, and number of tokens before and after the grid."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: Layout
    prefix: int
    suffix: int
    radius: int
    degree: int
    q_scale: float
    mask: Tensor | None


def prepare(
    q: Tensor, k: Tensor, v: Tensor, *, grid: Sequence[int], blocks: Sequence[int], radius: int = 2, degree: int = 1,
    prefix: int = 0, suffix: int = 0, q_scale: float = 1.0, key_padding_mask: Tensor | None = None,
) -> MultipoleCall:  # fmt: skip
    """Check a call; invalid arguments raise ValueError. Autocast casts tokens, except float64."""
    q, k, v = cast_tensors(q, k, v)
    layout = check_layout(grid, blocks, 0)
    check_grid_tokens(q.shape[1], layout.grid, prefix, suffix)
    if not is_count(radius):
        raise ValueError(f"radius must be a number of tokens of at least 0, got {radius!r}.")
    if degree not in DEGREES or isinstance(degree, bool):
        raise ValueError(f"degree must be 0, 1 or 2, got {degree!r}.")
    check_finite("q_scale", q_scale)
    check_sequences(q, key_padding_mask, None, None)
    radius = min(radius, max(layout.grid))  # with this radius all tokens are near
    return MultipoleCall(q, k, v, layout, prefix, suffix, radius, degree, float(q_scale), key_padding_mask)


def membership(call: MultipoleCall) -> Tensor:
    """Return which tokens lie in which block, [N, M] bool; tokens outside the grid lie in none."""
    blocks = F.pad(block_table(call.layout, call.q.device), (call.prefix, call.suffix), value=-1)
    return blocks[:, None] == torch.arange(call.layout.n_blocks, device=blocks.device)


def is_exact(call: MultipoleCall, first: int, last: int) -> Tensor:
    """Return which tokens are exact for the queries from `first` to `last` - 1, [I, N] bool."""
    tokens = torch.arange(call.q.shape[1], device=call.q.device) - call.prefix
    rows, columns = tokens[first:last, None], tokens
    near = torch.ones(1, 1, dtype=torch.bool, device=tokens.device)
    for length in reversed(call.layout.grid):
        near = near & ((rows % length - columns % length).abs() <= call.radius)
        rows, columns = rows // length, columns // length
    return near | (rows != 0) | (columns != 0)  # what is left is 0 for tokens of the grid alone


def definition(call: MultipoleCall) -> Tensor:
    """Reference: return o [B, N, H, Dv] in the dtype of q from N x N weights; exact in float64."""
    degree, mask, group = call.degree, call.mask, call.q.shape[2] // call.k.shape[2]
    q, k, v = (real(x, mask).to(compute_dtype(call.q.dtype)) for x in call[:3])
    live = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device) if mask is None else mask
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    s = call.q_scale * torch.einsum("bihd,bjhd->bhij", q, k)
    anchor = s.clone()
    for block in membership(call).mT:
        tokens = block.nonzero()[:, 0]
        weight = live[:, None, None, tokens].to(s.dtype)
        mean = (s[..., tokens] * weight).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp(min=1)
        anchor[..., tokens] = mean.expand(*mean.shape[:-1], len(tokens))
    exact = is_exact(call, 0, q.shape[1])
    power = torch.where(exact, s, anchor).masked_fill(~live[:, None, None], float("-inf"))
    w = (power - largest(power)).exp()
    if degree:
        r = s - anchor
        w = w * torch.where(exact, 1, 1 + r if degree == 1 else 1 + r + r**2 / 2)
    o = torch.einsum("bhij,bjhd->bihd", w / w.sum(-1, keepdim=True), v)
    return real(o, mask).to(call.q.dtype).contiguous()


def evaluate(call: MultipoleCall) -> Tensor:
    """Return o [B, N, H, Dv] in the dtype of q, by differentiable torch code in at least float32.

    Working memory: at most `PAIRS` weights, or one query per head, at a time; with gradients, weights are recomputed in
    the backward pass.
    """
    x = to_layout(*call[:3], call.q_scale, call.mask)
    b, h, n, _ = x.q.shape
    member = membership(call).to(x.k.dtype)
    count = member.mT @ (x.k.new_ones(n, 1) if x.live is None else x.live.to(x.k.dtype))
    anchors = member @ (member.mT @ x.k / count.clamp(min=1))  # [B, H, N, D], zero outside the grid
    rest = x.k - anchors
    step = max(1, PAIRS // max(1, b * h * n))
    run = read if step >= n else functools.partial(checkpoint, read, use_reentrant=False)
    parts = (x._replace(q=x.q[:, :, i : i + step]) for i in range(0, n, step))
    o = torch.cat([run(part, anchors, rest, i * step, call) for i, part in enumerate(parts)], 2)
    return real(o.transpose(1, 2), call.mask).to(call.q.dtype).contiguous()


def read(x: Heads, anchors: Tensor, rest: Tensor, first: int, call: MultipoleCall) -> Tensor:
    """Return o [B, H, I, Dv] of the queries x.q, the tokens from `first` on, for the keys anchors + rest."""
    exact = is_exact(call, first, first + x.q.shape[2])
    a, r = x.q @ anchors.mT, x.q @ rest.mT
    power = torch.where(exact, a + r, a)
    if x.live is not None:
        power = power.masked_fill(~x.live.mT, float("-inf"))
    w = (power - largest(power)).exp()
    if call.degree:
        r = r.masked_fill(exact, 0)
        w = w * (1 + r if call.degree == 1 else 1 + r + r.square() / 2)
    return (w @ x.v) / w.sum(-1, keepdim=True).clamp(min=SMALLEST)
