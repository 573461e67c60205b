"""Products of all tokens, [D, D] per head, for mixers that invert a matrix: in float32, outside autocast."""

import torch
from torch import Tensor

from hla_kernels.features import feature


def mean_product(a: Tensor, b: Tensor, count: float | Tensor) -> Tensor:
    """Sum_t a_t b_t' / count in float32 at least: a [B, N, H, D], b [B, N, H, E] -> [B, H, D, E].

    count: the number of tokens, or [B, 1, 1, 1] of them. The second tensor may have a multiple of the heads of the
    first, or the first of the second: heads that share are repeated.
    """
    dtype = torch.promote_types(a.dtype, torch.float32)
    heads = max(a.shape[2], b.shape[2])
    a, b = (t.to(dtype).repeat_interleave(heads // t.shape[2], dim=2) for t in (a, b))
    with torch.autocast(a.device.type, enabled=False):
        return torch.einsum("bnhd,bnhe->bhde", a, b) / count


def read(q: Tensor, matrix: Tensor) -> Tensor:
    """q_t W for every token: q [B, N, H, D], W [B, Hk, D, E] in float32 -> [B, N, H, E] in the type of q."""
    matrix = matrix.to(q.dtype).repeat_interleave(q.shape[2] // matrix.shape[1], dim=1)
    return torch.einsum("bnhd,bhde->bnhe", q, matrix)


def real_features(
    feature_map: str, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, float | Tensor]:
    """(phi q, phi k, v, count): features of the map, all zero outside the mask [B, N]; the number of real tokens."""
    q, k = feature(q, feature_map), feature(k, feature_map)
    if mask is None:
        return q, k, v, q.shape[1]
    live = mask[:, :, None, None]
    return q.where(live, 0), k.where(live, 0), v.where(live, 0), live.sum(1, keepdim=True).clamp(min=1)
