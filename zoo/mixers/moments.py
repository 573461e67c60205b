"""Key-value moments [D, D] per head in float32, for mixers that solve a linear system."""

import torch
from torch import Tensor

from hla_kernels.features import feature
from hla_kernels.ranks.collectives import add_ranks
from zoo.mixers.base import LinearMixer


class MomentMixer(LinearMixer):
    """Mixer whose tokens interact in sums only, which context parallelism adds over the devices."""

    shares_tokens = True

    def total(self, x: Tensor) -> Tensor:
        """Return a sum over the tokens of this device, added over all devices that share the tokens."""
        return x if self.group is None else add_ranks(x, self.group)

    def total_count(self, count: int | Tensor, like: Tensor) -> int | Tensor:
        """Return the number of tokens on all these devices; with a mask, of real tokens, at least 1."""
        if self.group is not None:
            count = self.total(torch.as_tensor(count, device=like.device, dtype=torch.float32))
        return count.clamp(min=1) if isinstance(count, Tensor) else count


def product(a: Tensor, b: Tensor) -> Tensor:
    """Compute Sum_t a_t b_t' in at least float32: a [B, N, H, D], b [B, N, H, E] -> [B, H, D, E].

    The number of heads of one tensor may be a multiple of the other; shared heads are repeated.
    """
    dtype = torch.promote_types(a.dtype, torch.float32)
    heads = max(a.shape[2], b.shape[2])
    a, b = (t.to(dtype).repeat_interleave(heads // t.shape[2], dim=2) for t in (a, b))
    with torch.autocast(a.device.type, enabled=False):
        return torch.einsum("bnhd,bnhe->bhde", a, b)


def apply_matrix(q: Tensor, matrix: Tensor) -> Tensor:
    """Compute q_t W for every token: q [B, N, H, D], W [B, Hk, D, E] in float32 -> [B, N, H, E] in the dtype of q."""
    matrix = matrix.to(q.dtype).repeat_interleave(q.shape[2] // matrix.shape[1], dim=1)
    return torch.einsum("bnhd,bhde->bnhe", q, matrix)


def real_features(
    feature_map: str, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, int | Tensor]:
    """Return (phi q, phi k, v, count): features set to zero outside the mask [B, N], and the number of real tokens."""
    q, k = feature(q, feature_map), feature(k, feature_map)
    if mask is None:
        return q, k, v, q.shape[1]
    valid = mask[:, :, None, None]
    return q.where(valid, 0), k.where(valid, 0), v.where(valid, 0), valid.sum(1, keepdim=True)
