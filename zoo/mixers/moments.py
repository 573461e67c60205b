"""Sums over tokens in float32: key-value moments [D, D] per head, and softmax over tokens."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hla_kernels.features import feature
from hla_kernels.ranks.collectives import add_ranks, add_tokens
from hla_kernels.sequences import real
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
            if not isinstance(count, Tensor):  # `as_tensor` would wait for the GPU
                count = torch.full((), count, device=like.device)
            count = self.total(count.float())
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
    count = q.shape[1] if mask is None else mask.sum(1)[:, None, None, None]
    return real(q, mask), real(k, mask), real(v, mask), count


def token_softmax(scores: Tensor, mask: Tensor | None, group: ProcessGroup | None) -> tuple[Tensor, int | Tensor]:
    """Return softmax over the tokens of scores [B, N, ...] in at least float32, and the number of tokens.

    Over the real tokens of mask [B, N], or the tokens of all devices of `group`; not both.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if group is not None:
        weights = (scores - token_max(scores, group)).exp()
        total, count = add_tokens(weights, group)
        return weights / total, count
    if mask is None:
        return scores.softmax(1), scores.shape[1]
    valid = mask[:, :, None, None]
    return scores.masked_fill(~valid, torch.finfo(scores.dtype).min).softmax(1).where(valid, 0), valid.sum(
        1, keepdim=True
    )


def token_max(scores: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the largest of scores [B, N, ...] over the tokens of all devices, [B, 1, ...], without a gradient."""
    least = scores.new_full((scores.shape[0], 1, *scores.shape[2:]), -torch.inf)  # a device may have no token
    largest = torch.cat([least, scores.detach()], 1).amax(1, keepdim=True)
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest
