"""The static table: tiles, warps and stages of every pass. No tuning at run time, and nothing depends on the batch."""

from __future__ import annotations

import torch
from torch import Tensor


def too_many(q: Tensor, v: Tensor, q2: Tensor | None) -> bool:
    """Whether so many tokens are faster by state in torch: its time is linear in N and in its features,
    D + R (R + 1) / 2 (R = D without a narrow pair), ours quadratic in N. On an H200 they would meet at N = 162,000 for
    D = 64 and 265,000 for D = 128, from forward and backward at 16,384 tokens; with R = 16 they met at 10,600 to 15,800
    for D = 64 and 11,300 for D = 128 (beside other work on the same GPU)."""
    d = q.shape[3]
    r = d if q2 is None else q2.shape[3]
    features = d + r * (r + 1) // 2
    return q.shape[1] * (d + d * (d + 1) // 2) > 2560 * max(d, v.shape[3]) * features


def width(w: dict[str, int]) -> int:
    """Columns of the wider of q and v, padding included."""
    return max(w["F1"] + w["F2"], w["V1"] + w["V2"])


def parts(n: int | torch.SymInt) -> int | torch.SymInt:
    """Programs that sum the tokens of a head: 1, or 4 from 513 tokens on. No branch on sizes: under a compiler they are
    symbols."""
    return 1 + 3 * torch.sym_min(1, n // 513)


def peeled(n: int, config: dict[str, int]) -> dict[str, int]:
    """A config, with PEEL: whether whole tiles of keys have a loop of their own, without masks. Where few tiles and a
    part of one make a head, starting a second loop costs more than masks."""
    return {**config, "PEEL": n % config["BN"] == 0 or n > 512}


def read_config(w: dict[str, int]) -> dict[str, int]:
    """Of `read_out`; 64 or 128 queries (BM)."""
    if width(w) > 80:
        return {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 3}
    few = {"maxnreg": 96} if width(w) <= 64 and w["R"] == 0 else {}
    return {"BM": 64, "BN": 32, "num_warps": 4, "num_stages": 3, **few}


def query_config(w: dict[str, int]) -> dict[str, int]:
    """Of `query_grads`; 64 or 128 queries (BM)."""
    if width(w) > 80:
        return {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 3}
    few = width(w) <= 64 and w["R"] == 0
    return {"BM": 64, "BN": 32, "num_warps": 4, "num_stages": 3, "maxnreg": 128 if few else 168}


def key_config(w: dict[str, int]) -> dict[str, int]:
    """Of `key_grads`; at most 64 queries (BM) at a time, which is what the buffer is padded to."""
    if width(w) <= 64:
        return {"BM": 32, "BN": 64, "num_warps": 4, "num_stages": 3, "maxnreg": 168}
    return {"BM": 64 if width(w) <= 80 else 32, "BN": 64, "num_warps": 4, "num_stages": 3}
