"""Definitions of the operators as dense N x N products of one sequence, independent of the package's own.

Tensors of one sequence are [H, N, .] with a key and value for each query head; the precision is that of the inputs.

With the option `magnitudes` the linear operators and `mhla` give the sum of the magnitudes of all their terms, and so
do the gradients: every factor of a product enters by its absolute value, a difference as a sum, and a ratio a / b as
|a| / b + |a| |b| / b^2, whose derivative in |b| has the magnitude of that of a / b. Whatever the order in which a form
sums its products, its rounding is at most n u times this, for paths of n operations with the unit roundoff u (Higham,
Accuracy and Stability of Numerical Algorithms, section 3.1), and mostly sqrt(n) u times (Higham and Mary, doi
10.1137/18M1226312).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Options = dict[str, Any]


def phi(x: Tensor, name: str | None) -> Tensor:
    """The feature maps."""
    if name == "relu":
        return x.clamp(min=0)
    if name == "elu1":
        return F.elu(x) + 1
    if name == "softmax":
        return x.softmax(-1)
    if name == "softmax_pair":
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)
    return x


def power(x: Tensor, exponent: Tensor, dtype: torch.dtype, o: Options) -> Tensor:
    """|y| y^p / |y^p| with y = relu(x), of x [..., H, N, D] and p [H]: tokens of an operator, so rounded to `dtype`.

    With the option `apart` the terms of its derivative, and those alone, enter by their magnitudes: the gradient of the
    features is rounded to `dtype`, too, relatively or as the smallest normal number is. Where it overflows, gradients
    are infinite.
    """
    info, step, power_of = torch.finfo(dtype), x.clamp(min=0), exponent[:, None, None].to(x.dtype)
    y, p = step.detach(), power_of.detach()
    s, total = (t.norm(dim=-1, keepdim=True) for t in (y, y**p))
    s, total = (t.where(t > 0, 1) for t in (s, total))
    u, log, sign = y**p / total, (y / s).where(y > 0, 1).log(), 1 if o.get("apart") else minus(o)
    raised = p * y ** (p - 1) / total * (step - y) + u * (log.abs() if sign > 0 else log) * (power_of - p)
    change = u * (y / s * (step - y)).sum(-1, keepdim=True)  # 0, like `raised`: derivatives alone
    change = change + s * (raised + sign * u * (u * raised).sum(-1, keepdim=True))

    def received(grad: Tensor) -> Tensor:
        if o.get("apart"):
            return grad.abs().clamp(min=info.smallest_normal)
        return grad if o.get("magnitudes") else grad.where(grad.abs() < info.max / 4, math.inf)

    out = (s * u).to(dtype).to(x) + change
    if out.requires_grad:
        out.register_hook(received)
    return out


def linear(op: str, q: Tensor, k: Tensor, v: Tensor, c: Tensor | None, gamma: Tensor | None, o: Options) -> Tensor:
    """`linear_attention` to `polynomial`; c [H, 4], gamma [H] or None. Two-sided forms weigh all tokens alike."""
    causal, ridge, center = o.get("causal", False), o.get("ridge", 0.0), o.get("center")
    q, k = (magnitude(x, x, o) for x in features(q, k, o.get("feature_map"), o))
    q, v = q * o.get("q_scale", 1.0), magnitude(v, v, o)
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    weight = past(q.shape[1], gamma, causal, q)
    mean = weight / weight.sum(-1, keepdim=True)
    s = o.get("scale") or (1.0 if causal else 1 / q.shape[1])
    if center == "qk":
        q = q + minus(o) * (mean @ q)

    def stage(keys: Tensor, values: Tensor, centred: bool = False) -> Tensor:
        """s sum_j weight_tj q_t.(keys_j - their mean at t) values_j."""
        scores = q @ keys.mT
        if centred:
            scores = scores + minus(o) * (q * (mean @ keys)).sum(-1, keepdim=True)
        return (s * weight * scores) @ values

    first = stage(k, values, bool(center))
    u = stage(k, k, bool(center)) + ridge * q
    if op == "hla2" and o.get("decay_rule") == "paper" and gamma is not None and bool((gamma != 1).any()):
        y = _paper(q, k, values, gamma, s, ridge, minus(o))
    elif op == "polynomial":
        assert c is not None
        terms = (first, stage(u, values), stage(k, first, bool(center)), stage(u, first))
        y = torch.stack([c[:, i, None, None].to(v.dtype) * term for i, term in enumerate(terms)]).sum(0)
    else:
        y = {
            "linear_attention": lambda: first,
            "ahla": lambda: stage(k, first, bool(center)) + ridge * first,
            "hla2": lambda: stage(u, values),
            "hla3": lambda: stage(u, first),
        }[op]()
    y, total = y[..., :-1], y[..., -1:]
    if o.get("normalize"):
        return ratio(y, total, o)
    return y + (1 + minus(o) * total) * (mean @ v) if o.get("mean_path") else y


def features(q: Tensor, k: Tensor, name: str | None, o: Options) -> tuple[Tensor, ...]:
    """phi(q), phi(k)."""
    if o.get("magnitudes") and name in ("softmax", "softmax_pair"):
        signs = (1,) if name == "softmax" else (1, -1)
        return tuple(torch.cat([_softmax_terms(sign * x, x) for sign in signs], -1) for x in (q, k))
    return phi(q, name), phi(k, name)


def _softmax_terms(x: Tensor, leaf: Tensor) -> Tensor:
    """softmax(x) with the magnitudes of its derivative in `leaf`, y_i (delta_ij + y_j)."""
    y, step = x.softmax(-1).detach(), leaf - leaf.detach()
    return y + y * step + y * (y * step).sum(-1, keepdim=True)


def magnitude(x: Tensor, source: Tensor, o: Options) -> Tensor:
    """|x| when magnitudes are wanted, with the derivative 1 in `source`, of which x is an orthogonal map."""
    return x.abs().detach() + source - source.detach() if o.get("magnitudes") else x


def minus(o: Options) -> int:
    """The sign of a difference."""
    return 1 if o.get("magnitudes") else -1


def held(x: Tensor, o: Options) -> Tensor:
    """x, a denominator or a mean; a constant with the option `held`, so that gradients through x are left out."""
    return x.detach() if o.get("held") else x


def ratio(y: Tensor, total: Tensor, o: Options) -> Tensor:
    """Weighted sums over the sums of their weights, which are positive."""
    total = held(total, o) + o.get("eps", 1e-6)
    if not o.get("magnitudes"):
        return y / total
    return y / total.detach() + (y / total.square()).detach() * total


def past(n: int, gamma: Tensor | None, causal: bool, like: Tensor) -> Tensor:
    """gamma^(t - j) for j <= t, else 0; all ones if not causal. [1 or H, N, N]."""
    if not causal:
        return like.new_ones(1, n, n)
    t = torch.arange(n, device=like.device)
    distance = (t[:, None] - t[None]).clamp(min=0)
    weight = like.new_ones(1, n, n) if gamma is None else gamma.to(like.dtype)[:, None, None] ** distance
    return weight * (t[:, None] >= t[None])


def _paper(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, s: float, ridge: float, sign: int) -> Tensor:
    """The serial rule of the paper, token by token."""
    g = gamma.to(q.dtype)[:, None, None]
    h, n, d = q.shape
    big, c, removed = q.new_zeros(h, d, d), q.new_zeros(h, d, v.shape[2]), q.new_zeros(h, d, v.shape[2])
    out = []
    for t in range(n):
        qt, kt, vt = (x[:, t : t + 1] for x in (q, k, v))
        removed = g * removed + kt.mT @ (kt @ c)
        big, c = g * big + kt.mT @ kt, g * c + qt.mT @ vt
        out.append(s * s * (qt @ (big @ c) + sign * (qt @ removed)) + ridge * s * (qt @ c))
    return torch.cat(out, 1)


def blocks_of(grid: tuple[int, ...], blocks: tuple[int, ...], prefix: int) -> list[int]:
    """The block of each token: axes are cut at i L // m, in raster order behind one block of the prefix."""
    cells = torch.zeros(1, dtype=torch.long)
    for length, m in zip(grid, blocks, strict=True):
        ends = torch.tensor([(i + 1) * length // m for i in range(m)])
        cells = (cells[:, None] * m + torch.bucketize(torch.arange(length), ends, right=True)).flatten()
    return [0] * prefix + (cells + (prefix > 0)).tolist()


def turned(x: Tensor, cos: Tensor, sin: Tensor, half: bool) -> Tensor:
    """x [H, N, F] by the angles of cos, sin [1 or H, N, D / 2], each D features alike."""
    width = 2 * cos.shape[-1]
    parts = []
    for part in x.split(width, -1):
        a, b = (part[..., : width // 2], part[..., width // 2 :]) if half else (part[..., ::2], part[..., 1::2])
        y, z = a * cos - b * sin, a * sin + b * cos
        parts.append(torch.cat([y, z], -1) if half else torch.stack([y, z], -1).flatten(-2))
    return torch.cat(parts, -1)


def mhla(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, keep: Tensor, rotary: tuple[Tensor, Tensor] | None, o: Options
) -> Tensor:
    """Block mixing; mixing [1 or H, M, M], keep [N]: the tokens that are real."""
    n, order = q.shape[1], o.get("order", "la")
    block = blocks_of(o["grid"], o["blocks"], o.get("prefix", 0))[:n]
    m = mixing[:, block][:, :, block].to(q.dtype) * keep.to(q.dtype)
    scale = o.get("scale")
    if scale is None:
        scale = 1.0 if o.get("causal") else mixing.shape[-1] / max(1, int(keep.sum()))
    scale = scale * o.get("q_scale", 1.0)
    causal = torch.ones(n, n, dtype=q.dtype, device=q.device)
    causal = causal.tril() if o.get("causal") else causal
    q, k = features(q, k, o.get("feature_map", "relu"), o)

    def weights(q: Tensor, k: Tensor) -> Tensor:
        a = scale * (q @ k.mT) * causal
        if order == "la":
            return m * a
        return m * causal * ((m * a) @ (a if order == "ahla" else a.mT))

    read = (q, k) if rotary is None else (turned(x, *rotary, o.get("rotary_half", False)) for x in (q, k))
    y = weights(*(magnitude(x, source, o) for x, source in zip(read, (q, k), strict=True))) @ magnitude(v, v, o)
    if o.get("normalize", True):
        y = ratio(y, weights(q, k).sum(-1, keepdim=True), o)
    return y


def taylor2(q: Tensor, k: Tensor, v: Tensor, c: Tensor, narrow: list[Tensor] | None, o: Options) -> Tensor:
    """The second-order expansion of softmax around uniform weights; c [H, 2]."""

    def scores(q: Tensor, k: Tensor) -> Tensor:
        return o.get("q_scale", 1.0) * (q @ (k - held(k.mean(1, keepdim=True), o)).mT)

    n, mean = q.shape[1], held(v.mean(1, keepdim=True), o)
    s = scores(q, k)
    r = s if narrow is None else scores(*narrow)
    c = c.to(q.dtype)[:, :, None, None]
    second = c[:, 1] * r.square() / 2
    y = (c[:, 0] * s + second) @ (v - mean) / n
    return mean + (y / (1 + held(second.mean(-1, keepdim=True), o)) if o.get("normalize", True) else y)


def softmax(q: Tensor, k: Tensor, v: Tensor, o: Options) -> Tensor:
    """Softmax attention."""
    scale = o.get("scale")
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.mT)
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1) if o.get("causal") else scores.isnan()
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def delta(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None, a: Tensor | None, b: Tensor | None) -> Tensor:
    """o_t = q_t' sum_j T_t ... T_{j+1} k_j v_j', T = diag(exp(log_f)) - sum a b'; k, v [H, N, D] or [H, N, s, D]."""
    k, v = (x if x.dim() == 4 else x[:, :, None] for x in (k, v))
    transition = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device).expand(*q.shape, -1)
    if log_f is not None:
        log_f = log_f.view(*log_f.shape, *[1] * (3 - log_f.dim()))
        transition = log_f.to(q.dtype).exp()[..., None] * transition
    if a is not None and b is not None:
        transition = transition - a.mT @ b
    state, out = torch.zeros_like(k[:, 0].mT @ v[:, 0]), []
    for t in range(q.shape[1]):
        state = transition[:, t] @ state + k[:, t].mT @ v[:, t]
        out.append(q[:, t, None] @ state)
    return torch.cat(out, 1)


def tiles_of(grid: tuple[int, ...], size: int) -> tuple[Tensor, Tensor]:
    """The tile of each grid token, and twice the centre of each tile [tiles, axes]: tiles are boxes of at most `size`
    tokens that minimise the number of tiles times surface over volume, and of equal ones the shortest along the first
    axes."""

    def cost(box: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        tiles = math.prod(-(-length // s) for length, s in zip(grid, box, strict=True))
        return tiles * sum(1 / s for length, s in zip(grid, box, strict=True) if length > 1), box

    sides = itertools.product(*(range(1, min(length, size) + 1) for length in grid))
    box = min((sides_of for sides_of in sides if math.prod(sides_of) <= size), key=cost)
    number, centres = torch.zeros(1, dtype=torch.long), torch.zeros(1, 0)
    for length, s in zip(grid, box, strict=True):
        x = torch.arange(length)
        first = torch.arange(0, length, s)
        middle = (first + (first + s).clamp(max=length) - 1).to(centres)
        number = (number[:, None] * len(first) + x // s).flatten()
        centres = torch.cat([centres.repeat_interleave(len(first), 0), middle.repeat(len(centres))[:, None]], -1)
    return number, centres


def fours_of(grid: tuple[int, ...], tile: Tensor, size: int) -> Tensor:
    """Which four neighbours each grid token belongs to [N, parts]: within its tile (of at most `size` tokens), those
    that follow each other when the bits of their coordinates are interleaved."""
    number = torch.zeros_like(tile)
    places = list(itertools.product(*map(range, grid)))
    for one in tile.unique().tolist():
        tokens = (tile == one).nonzero()[:, 0].tolist()
        first = [min(x) for x in zip(*(places[t] for t in tokens), strict=True)]
        inside = {t: [x - y for x, y in zip(places[t], first, strict=True)] for t in tokens}
        bits = {t: [x >> i & 1 for i in range(9, -1, -1) for x in inside[t]] for t in tokens}
        for i, t in enumerate(sorted(tokens, key=bits.__getitem__)):
            number[t] = one * size + i // 4
    return F.one_hot(number.unique(return_inverse=True)[1])


def adaptive_multipole(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, o: Options) -> Tensor:
    """Softmax, exact for the key tiles with the highest scores; other tiles enter by their means; keep [N]."""
    outer = (0, 0, o["prefix"], o["suffix"])
    (of_key, at_key), (of_query, at_query) = (tiles_of(o["grid"], o[name]) for name in ("k_tile", "q_tile"))
    member, own = (F.pad(F.one_hot(x).to(q), outer) * keep[:, None] for x in (of_key, of_query))
    n = member.sum(0)
    mean = member.mT @ k / n.clamp(min=1)[:, None]
    variance = member.mT @ (k - member @ mean).square() / n.clamp(min=1)[:, None]
    q = o["q_scale"] * q
    s, a = q @ k.mT, q @ mean.mT
    # queries pooled by four and by whole tiles: score of the mass and the spread that they see
    parts = F.pad(fours_of(o["grid"], of_query, o["q_tile"]).to(q), outer) * keep[:, None]
    some, query = (x.mT @ q / x.sum(0).clamp(min=1)[:, None] for x in (parts, own))
    wide = some.square() @ variance.mT
    share = (some @ mean.mT + wide / 2 + n.log()).softmax(-1)
    score = {
        "error": (own.mT @ parts) @ (share * wide),
        "mass": (own.mT @ parts) @ share,
        "mean": query @ mean.mT,
        "near": -(at_query[:, None] - at_key[None]).square().sum(-1).to(q).expand(len(q), -1, -1),
    }[o["select"]]
    score = score if o["select"] == "near" else score.masked_fill(n == 0, float("-inf"))
    exact = max(1, int(o["density"] * len(n) + 0.5))
    best = score.argsort(dim=-1, descending=True, stable=True)[..., :exact]
    near = own @ torch.zeros_like(score).scatter(-1, best, 1.0)
    far = (own.sum(-1, keepdim=True) * (1 - near)).bool() & (n > 0)  # [H, N, tiles]
    b = a + q.square() @ variance.mT / 2 if o["far"] == "variance" else a
    e = torch.where((far.to(q) @ member.mT).bool(), b @ member.mT, s).masked_fill(~keep, float("-inf"))
    if o["far"] == "none":
        e = e.masked_fill((far.to(q) @ member.mT).bool(), float("-inf"))
    w = e.softmax(-1)
    if o["far"] == "first":
        share = (b - e.logsumexp(-1, keepdim=True)).exp().where(far, 0).sum(-1, keepdim=True) / (n > 0).sum()
        w = w + share * (s - a @ member.mT) * member.sum(-1)
    return w @ v


def multipole(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, o: Options) -> Tensor:
    """Softmax, exact for near tokens, expanded around the mean key of each block for the others; keep [N]."""
    grid, prefix, n = o["grid"], o.get("prefix", 0), q.shape[1]
    last = prefix + math.prod(grid)
    s = o.get("q_scale", 1.0) * (q @ k.mT)
    block = torch.tensor(blocks_of(grid, o["blocks"], 0), device=q.device)
    member = F.one_hot(block).to(q.dtype) * keep[prefix:last, None]
    mean = member @ (member / member.sum(0).clamp(min=1)).mT  # [N, N]: the mean over the block of a token
    at = torch.cartesian_prod(*[torch.arange(length, device=q.device) for length in grid]).reshape(-1, len(grid))
    near = ((at[:, None] - at[None]).abs() <= o.get("radius", 2)).all(-1)
    exact = torch.ones(n, n, dtype=torch.bool, device=q.device)
    exact[prefix:last, prefix:last] = near
    a = s.clone()
    a[..., prefix:last] = s[..., prefix:last] @ mean.mT
    rest = (s - a).masked_fill(exact, 0)
    degree = o.get("degree", 1)
    w = torch.where(exact, s, a).masked_fill(~keep, float("-inf")).softmax(-1)
    w = w * ((1.0, 1 + rest, 1 + rest + rest.square() / 2)[degree])
    return (w @ v) / w.sum(-1, keepdim=True)
