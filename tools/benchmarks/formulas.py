"""Operators in plain torch: the eager peer in bfloat16 and the reference in float64.

Independent of `hla_kernels`. Symbols: P = K'V / N, S = K'K / N, C = Q'V / N, R = K'Q / N, Qm = Q'Q / N. All tensors are
[B, H, N, D].
"""

import functools
import math
from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 1024
POWER = 3.0  # exponent of the map "power", the initial one of the zoo


def plain(
    op: str, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor | None = None, *, feature_map: str | None = None,
    normalize: bool = False, center: str | None = None, mean_path: bool = False, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """Compute o = q M of a two-sided operator.

    coefficients: [H, 4], polynomial only. Feature maps: None, "relu", "elu1", "softmax_pair" and "power".
    """
    if feature_map == "relu":
        q, k = q.relu(), k.relu()
    if feature_map == "elu1":
        q, k = F.elu(q) + 1, F.elu(k) + 1
    if feature_map == "softmax_pair":
        q, k = (torch.cat([x.softmax(-1), (-x).softmax(-1)], -1) for x in (q, k))
    if feature_map == "power":
        q, k = _power(q), _power(k)
    if center == "k":
        k = k - k.mean(-2, keepdim=True)
    mean = v.mean(-2, keepdim=True) if mean_path else None
    if mean is not None:
        v = v - mean
    n = q.shape[-2]
    o = q @ _matrix(op, q, k, coefficients, lambda x: x.mT @ v / n)
    if normalize:
        o = o / (q @ _matrix(op, q, k, coefficients, lambda x: x.mean(-2, keepdim=True).mT) + eps)
    return o if mean is None else o + mean


def _power(x: Tensor) -> Tensor:
    """Compute |y| y^p / |y^p|, y = relu(x)."""
    y = x.relu()
    raised = y**POWER
    length = raised.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)  # 0 without a positive channel
    return raised * (y.norm(dim=-1, keepdim=True) / length)


def _matrix(op: str, q: Tensor, k: Tensor, c: Tensor | None, with_values: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute M of one order or of their mixture; `with_values(x)` is the moment of x with v (or with ones)."""
    n = q.shape[-2]
    if op == "linear_attention":
        return with_values(k)
    if op == "hla2":
        return (k.mT @ k / n) @ with_values(q)
    if op == "ahla":
        return (k.mT @ q / n) @ with_values(k)
    if op == "hla3":
        return (k.mT @ k / n) @ ((q.mT @ q / n) @ with_values(k))
    assert c is not None, "polynomial needs coefficients"
    s, p = k.mT @ k / n, with_values(k)
    orders = (p, s @ with_values(q), (k.mT @ q / n) @ p, s @ ((q.mT @ q / n) @ p))
    weights = c.to(q.dtype)[:, :, None, None]
    return sum(weights[:, i] * order for i, order in enumerate(orders))  # type: ignore[return-value]


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute softmax(q k' / sqrt(D)) v in chunks of queries, recomputed in the backward pass."""

    def rows(part: Tensor) -> Tensor:
        return (part @ k.mT * part.shape[-1] ** -0.5).softmax(-1) @ v

    return torch.cat([checkpoint(rows, part, use_reentrant=False) for part in q.split(CHUNK, -2)], -2)


def taylor(q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor) -> Tensor:
    """Average v with weights 1 + c1 s + c2 s^2 / 2, s = q.(k - mean k) / sqrt(D), c [H, 2]; chunks as in `softmax`."""
    k, c = k - k.mean(-2, keepdim=True), coefficients.to(q.dtype)[:, :, None, None]

    def rows(part: Tensor) -> Tensor:
        s = part @ k.mT * part.shape[-1] ** -0.5
        w = 1 + s * (c[:, 0] + c[:, 1] * s / 2)
        return w @ v / w.sum(-1, keepdim=True)

    return torch.cat([checkpoint(rows, part, use_reentrant=False) for part in q.split(CHUNK, -2)], -2)


def multipole(
    q: Tensor, k: Tensor, v: Tensor, *, grid: tuple[int, ...], blocks: tuple[int, ...], radius: int, degree: int
) -> Tensor:
    """Compute softmax(q k' / sqrt(D)) v with an expanded far field, in chunks as in `softmax`.

    For tokens farther than `radius` along an axis of the grid, exp(s) is expanded around a, the mean of s over the
    block of the key, up to (s - a)^degree.
    """
    axes = [torch.arange(length, device=q.device) for length in grid]
    places = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)
    own = torch.zeros_like(places[0])
    for x, length, m in zip(places, grid, blocks, strict=True):
        ends = torch.tensor([(i + 1) * length // m for i in range(m)], device=q.device)
        own = own * m + torch.bucketize(x, ends, right=True)
    mean = torch.stack([k[..., own == block, :].mean(-2) for block in range(math.prod(blocks))], -2)

    def rows(part: Tensor, at: Tensor) -> Tensor:
        near = (at[:, :, None] - places[:, None]).abs().amax(0) <= radius
        s, a = part @ k.mT * part.shape[-1] ** -0.5, (part @ mean.mT * part.shape[-1] ** -0.5)[..., own]
        power = torch.where(near, s, a)
        terms = sum((s - a) ** i / math.factorial(i) for i in range(degree + 1))
        w = (power - power.detach().amax(-1, keepdim=True)).exp() * torch.where(near, 1, terms)
        return w @ v / w.sum(-1, keepdim=True)

    chunks = zip(q.split(CHUNK, -2), places.split(CHUNK, -1), strict=True)
    return torch.cat([checkpoint(rows, part, at, use_reentrant=False) for part, at in chunks], -2)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute o_t = sum_{j <= t} (q_t . k_j) v_j in chunks, with the state K'V of the preceding tokens."""
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    out = []
    for a, b, c in zip(*(x.split(CHUNK, -2) for x in (q, k, v)), strict=True):
        out.append(a @ state + (a @ b.mT).tril() @ c)
        state = state + b.mT @ c
    return torch.cat(out, -2)


def mixed(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, *, grid: tuple[int, ...], blocks: tuple[int, ...],
    feature_map: str = "relu", normalize: bool = True, eps: float = 1e-6, order: str = "la", rotary: bool = False,
    moments: str = "",
) -> Tensor:  # fmt: skip
    """Compute MHLA as in the paper: tokens in block order, K_b'V_b per block, their mixtures, o = q S~ / (q.z~).

    q and k in S~ are rotated by `angles` (rotary); without the ratio o is multiplied by M / N. Higher orders mix two
    moments per block. Narrow blocks are padded with zeros. moments: used by ours only.
    """
    assert feature_map == "relu" and (order == "la" or not normalize)
    places, back = _blocks(tuple(grid), tuple(blocks), q.device)
    n, m = q.shape[-2], mixing.to(q.dtype)
    q, k = q.relu(), k.relu()
    tokens = [q, k, v, *(rotated(x, *angles(n, q.shape[-1], q.device)) for x in (q, k) if rotary)]
    if any(length % cuts for length, cuts in zip(grid, blocks, strict=True)):
        tokens = [F.pad(x, (0, 0, 0, 1)) for x in tokens]
    q, k, v, *rest = (x[..., places, :] for x in tokens)
    turned_q, turned_k = rest or (q, k)

    def mix(moments: Tensor) -> Tensor:
        return torch.einsum("ib,...bde->...ide", m, moments)

    if order == "la":
        o = turned_q @ mix(turned_k.mT @ v)
    elif order == "ahla":
        o = turned_q @ (mix(turned_k.mT @ turned_q) @ mix(turned_k.mT @ v))
    else:
        o = turned_q @ (mix(turned_k.mT @ turned_k) @ mix(turned_q.mT @ v))
    if normalize:
        o = o / (q @ (m @ k.sum(-2))[..., None] + eps * n / len(m))  # eps is relative to means
    else:
        o = o * (len(m) / n) ** (1 if order == "la" else 2)
    return o.flatten(-3, -2)[..., back, :]


@functools.lru_cache
def angles(n: int, d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) [N, D / 2] of a rotary embedding of positions 0 .. N - 1 with base 10000."""
    places = torch.arange(n, device=device, dtype=torch.float64)
    x = places[:, None] * 10000.0 ** -torch.linspace(0, 1, d // 2, device=device, dtype=torch.float64)
    return x.cos().float(), x.sin().float()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels (2i, 2i + 1) of x in at least float32."""
    even, odd = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2).to(x.dtype)


@functools.lru_cache
def _blocks(grid: tuple[int, ...], blocks: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tokens of each block [M, W], N for padding of narrow blocks, and the position of each token."""
    cuts = [[range(i * n // m, (i + 1) * n // m) for i in range(m)] for n, m in zip(grid, blocks, strict=True)]
    numbers = torch.arange(math.prod(grid)).reshape(grid)
    lists = [numbers[torch.meshgrid(*map(torch.tensor, box), indexing="ij")].flatten() for box in product(*cuts)]
    order = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True, padding_value=len(numbers.flatten()))
    return order.to(device), order.flatten().argsort(stable=True)[: numbers.numel()].to(device)


def locality(blocks: tuple[int, ...]) -> Tensor:
    """Return the linear initialisation of the mixing matrix of the paper.

    1 - distance of the blocks relative to the row maximum; rows sum to one.
    """
    places = torch.tensor(list(product(*map(range, blocks))), dtype=torch.float32)
    distance = torch.cdist(places, places)
    near = 1 - distance / distance.amax(1, keepdim=True)
    return near / near.sum(1, keepdim=True)
