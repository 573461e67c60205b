"""Static table of tiles, warps and stages per pass, independent of the batch size."""

from __future__ import annotations

import torch
from torch import Tensor


def too_many(q: Tensor, v: Tensor, q2: Tensor | None) -> bool:
    """Whether the torch form by state is faster for this number of tokens.

    The time of the torch form is linear in N and in the D + R (R + 1) / 2 features (R = D without a narrow pair); the
    time of the Triton form is quadratic in N. On an H200, forward and backward at 16,384 tokens extrapolate to equal
    times at N = 162,000 for D = 64 and 265,000 for D = 128. With R = 16, equal times were measured at 10,600 to 15,800
    for D = 64 and 11,300 for D = 128 (on a GPU shared with other work).
    """
    d = q.shape[3]
    r = d if q2 is None else q2.shape[3]
    features = d + r * (r + 1) // 2
    return q.shape[1] * (d + d * (d + 1) // 2) > 2560 * max(d, v.shape[3]) * features


def width(w: dict[str, int]) -> int:
    """Return the columns of the wider of q and v, including padding."""
    return max(w["F1"] + w["F2"], w["V1"] + w["V2"])


def parts(n: int | torch.SymInt) -> int | torch.SymInt:
    """Return the number of programs that sum the tokens of a head: 1, or 4 from 513 tokens on. No branch on sizes,
    which may be symbolic while compiling."""
    return 1 + 3 * torch.sym_min(1, n // 513)


def peeled(n: int, config: dict[str, int]) -> dict[str, int]:
    """Add PEEL to a config: whether full tiles of keys are read in a separate loop without masks. With few tiles per
    head, starting a second loop costs more than masks."""
    return {**config, "PEEL": n % config["BN"] == 0 or n > 512}


def read_config(w: dict[str, int]) -> dict[str, int]:
    """Return the config of `read_out`; BM is 64 or 128 queries."""
    if width(w) > 80:
        return {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 3}
    few = {"maxnreg": 96} if width(w) <= 64 and w["R"] == 0 else {}
    return {"BM": 64, "BN": 32, "num_warps": 4, "num_stages": 3, **few}


def query_config(w: dict[str, int]) -> dict[str, int]:
    """Return the config of `query_grads`; BM is 64 or 128 queries."""
    if width(w) > 80:
        return {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 3}
    few = width(w) <= 64 and w["R"] == 0
    return {"BM": 64, "BN": 32, "num_warps": 4, "num_stages": 3, "maxnreg": 128 if few else 168}


def key_config(w: dict[str, int]) -> dict[str, int]:
    """Return the config of `key_grads`; BM is at most 64 queries, the padding of the buffer."""
    if width(w) <= 64:
        return {"BM": 32, "BN": 64, "num_warps": 4, "num_stages": 3, "maxnreg": 168}
    return {"BM": 64 if width(w) <= 80 else 32, "BN": 64, "num_warps": 4, "num_stages": 3}
