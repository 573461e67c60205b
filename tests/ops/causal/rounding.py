"""Errors of gradients of causal ratios by the intermediate that is rounded, emulated in float64.

    python -m tests.ops.causal.rounding

prints the mean relative L2 error of dq, dk and dv over heads, for each operator and each rounded intermediate.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

INNER = {"linear_attention": "", "ahla": "r dr", "hla2": "u du", "hla3": "u r du dr"}
Rounding = Callable[[Tensor], Tensor]


def bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def tf32(x: Tensor) -> Tensor:
    return ((x.float().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32).double()


def gradients(op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, rounding: dict[str, Rounding]) -> list[Tensor]:
    """o, dq, dk and dv of a ratio of features q, k [N, D], values v and gradient g [N, Dv], by the equations of
    `hla_kernels.hla.stages.compose`. rounding: for u, r, du, dr, the gradient "do" of the numerator, and "weights", the
    products of all pairs of tokens."""
    seen, one = torch.ones(len(q), len(q), dtype=q.dtype).tril(), torch.ones_like(v[:, :1])

    def rounded(name: str, x: Tensor, extra: bool = False) -> Tensor:
        f = rounding.get(name, lambda x: x)
        return torch.cat([f(x[:, :-1]), x[:, -1:]], 1) if extra else f(x)

    def la(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return rounded("weights", seen * (x @ y.T)) @ z

    def lr(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return rounded("weights", seen * (y @ x.T)).T @ z

    v = torch.cat([v, one], 1)
    u = rounded("u", la(q, k, k)) if op in ("hla2", "hla3") else k
    r = rounded("r", la(q, k, v), True) if op in ("ahla", "hla3") else v
    total = la(q, u, r)
    o = total[:, :-1] / total[:, -1:]
    do = rounded("do", g / total[:, -1:])
    do = torch.cat([do, -(do * o).sum(1, keepdim=True)], 1)
    dq, dk, dr = la(do, r, u), lr(r, do, q), lr(u, q, do)  # of the last stage: dk is du of hla2 and hla3
    if op in ("hla2", "hla3"):
        du = rounded("du", dk)
        dq, dk = dq + la(du, k, k), lr(k, du, q) + lr(k, q, du)
    if op in ("ahla", "hla3"):
        dr = rounded("dr", dr, True)
        dq, dk, dr = dq + la(dr, v, k), dk + lr(v, dr, q), lr(k, q, dr)
    return [o, dq, dk, dr[:, :-1]]


def setting(n: int, seed: int) -> list[Tensor]:
    """ReLU features q and k, v, and the gradient of o, [n, 64], all exact in bfloat16."""
    random = torch.Generator().manual_seed(seed)
    q, k, v, g = (bfloat16(torch.randn(n, 64, dtype=torch.float64, generator=random)) for _ in range(4))
    return [q.relu(), k.relu(), v, g]


def errors(op: str, names: str, f: Rounding, n: int = 1024, heads: int = 6) -> list[float]:
    """Mean relative L2 errors of o, dq, dk and dv over heads if the named intermediates are rounded by f."""
    found = []
    for seed in range(heads):
        pairs = zip(*(gradients(op, *setting(n, seed), dict.fromkeys(x, f)) for x in (names.split(), ())), strict=True)
        found.append([float((a - b).norm() / b.norm()) for a, b in pairs])
    return torch.tensor(found).mean(0).tolist()


if __name__ == "__main__":
    for op, inner in INNER.items():
        everything = f"do weights {inner}"
        for names, f in [*((x, bfloat16) for x in (*everything.split(), everything)), (everything, tf32)]:
            _, *of_tokens = errors(op, names, f)
            sys.stdout.write(f"{op:16s} {f.__name__} {names:26s} {' '.join(f'{x:.1e}' for x in of_tokens)}\n")
