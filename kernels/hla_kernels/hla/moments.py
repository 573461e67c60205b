"""Two-sided moments of the tokens, and the matrix per head computed from them.

All tensors are in head layout: q [B, Hk, G, N, D], k [B, Hk, 1, N, D], v [B, Hk, 1, N, Dv]. A moment of keys (and
values) alone has a group axis of 1. Centring and the mean path are rank-one corrections of the moments, without another
pass over the tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..options import Options, needs_ones
from ..sequences import live_heads

# moment -> its two factors
FACTORS = {"P": ("k", "v"), "S": ("k", "k"), "C": ("q", "v"), "R": ("k", "q"), "Qm": ("q", "q")}

# operator -> moments, in the order of the product
MOMENTS = {
    "linear_attention": ("P",),
    "hla2": ("S", "C"),
    "ahla": ("R", "P"),
    "hla3": ("S", "Qm", "P"),
    "polynomial": ("P", "S", "C", "R", "Qm"),
}
ORDERS = ("linear_attention", "hla2", "ahla", "hla3")  # the terms of `polynomial`, in the order of its coefficients


def is_centred(name: str, center: str | None) -> bool:
    """Whether a moment changes under centring, that is whether one of its two factors is centred."""
    return center == "qk" or (center == "k" and "k" in FACTORS[name])


def sum_names(op: str, options: Options) -> tuple[str, ...]:
    """Return the names of the plain token sums needed in addition to the moments: both factors of a centred moment, the
    factor multiplied by v if v = 1 is needed, v for the mean path, and q for centred queries."""
    needed = set("v" if options.mean_path else "") | set("q" if options.center == "qk" else "")
    for name in MOMENTS[op]:
        a, b = FACTORS[name]
        if is_centred(name, options.center):
            needed |= {a, b}
        elif needs_ones(options) and b == "v":
            needed.add(a)
    return tuple("sum_" + name for name in "qkv" if name in needed)


def moment_scale(n: float | Tensor, options: Options) -> float | Tensor:
    """Return the scale s for n tokens: the given number (which includes q_scale), or q_scale / n."""
    return options.q_scale / n if options.scale is None else options.scale


def token_sums(op: str, q: Tensor, k: Tensor, v: Tensor, options: Options) -> dict[str, Tensor]:
    """Return the raw sums over tokens: the moments of `op` among P, S, C, R, Qm before scaling, and the `sum_names`
    among sum_q, sum_k, sum_v [.., 1, D]."""
    tokens = {"q": q, "k": k, "v": v}
    sums = {name: tokens[FACTORS[name][0]].mT @ tokens[FACTORS[name][1]] for name in MOMENTS[op]}
    sums.update({name: tokens[name.removeprefix("sum_")].sum(-2, keepdim=True) for name in sum_names(op, options)})
    return sums


def moments(op: str, sums: dict[str, Tensor], n: float | Tensor, options: Options) -> dict[str, Tensor]:
    """Return scaled and centred moments from raw sums over n tokens; v has a column of ones if `needs_ones`.

    sum (a - mean a)(b - mean b)' = sum a b' - (sum a)(sum b)'/n;  sum a 1 = sum a.  Returns P [B, Hk, 1, D, Dv (+1)]
                                                                   and so on.
    """
    s = moment_scale(n, options)
    ones = needs_ones(options)
    out = {}
    for name in MOMENTS[op]:
        a, b = FACTORS[name]
        m = sums[name]
        centred = is_centred(name, options.center)
        if centred:
            m = m - sums["sum_" + a].mT @ (sums["sum_" + b] / n)
        if ones and b == "v":
            # centred tokens sum to zero
            m = torch.cat([m, torch.zeros_like(m[..., :1]) if centred else sums["sum_" + a].mT], -1)
        out[name] = m * s
    if options.ridge:
        first = MOMENTS[op][0]  # S or R; lambda I is added after scaling and centring
        m = out[first]
        out[first] = m + options.ridge * torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)
    return out


def product(order: str, m: dict[str, Tensor]) -> Tensor:
    """Return the operator matrix of one order: P, S C, R P or S Qm P, [B, Hk, G or 1, D, Dv (+1)]."""
    if order == "linear_attention":
        return m["P"]
    if order == "hla2":
        return m["S"] @ m["C"]
    if order == "ahla":
        return m["R"] @ m["P"]
    return m["S"] @ (m["Qm"] @ m["P"])


def operator_matrix(
    op: str, sums: dict[str, Tensor], n: float | Tensor, options: Options, coefficients: Tensor | None = None
) -> Tensor:
    """Return M with o = q M from raw sums over n tokens: the product of one order, or with coefficients [H, 4]
    c1 P + c2 S C + c3 R P + c4 S Qm P."""
    m = moments(op, sums, n, options)
    if coefficients is None:
        return product(op, m)
    c = coefficients.to(m["P"].dtype).unflatten(0, (m["P"].shape[1], -1))[..., None, None]  # [Hk, G, 4, 1, 1]
    total = c[:, :, 0] * product(ORDERS[0], m)
    for i, order in enumerate(ORDERS[1:], 1):
        total = total + c[:, :, i] * product(order, m)
    return total


def read_out(
    q: Tensor, matrix: Tensor, sums: dict[str, Tensor], n: float | Tensor, options: Options, mask: Tensor | None = None
) -> Tensor:
    """Return o [B, Hk, G, N, Dv] = q M, with the denominator or the rank-one corrections of centring and mean path.

    normalize: (q M_v) / (q M_1 + eps).  mean_path: M = M_v - M_1 vbar', o = q M + vbar.  center="qk": o - qbar M.
    Tokens outside `mask` [B, N] get zeros.
    """
    if options.normalize:
        return live_heads((q @ matrix[..., :-1]) / (q @ matrix[..., -1:] + options.eps), mask)
    matrix, *row = affine(matrix, sums, n, options)
    y = q @ matrix
    return live_heads(y + row[0], mask) if row else y


def affine(matrix: Tensor, sums: dict[str, Tensor], n: float | Tensor, options: Options) -> tuple[Tensor, ...]:
    """Return (M, b) of o = q M + b, [B, Hk, G, D, Dv] and [B, Hk, G, 1, Dv], or (M,) without b."""
    row = None
    if options.mean_path:
        row = sums["sum_v"] / n
        matrix = matrix[..., :-1] - matrix[..., -1:] @ row
    if options.center == "qk":
        shift = (sums["sum_q"] / n) @ matrix
        row = -shift if row is None else row - shift
    return (matrix,) if row is None else (matrix, row)
