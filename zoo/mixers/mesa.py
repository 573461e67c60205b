"""Mesa layer: ridge regression of the values on the keys, evaluated at each query."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.mixers.base import EPS
from zoo.mixers.context import LayerSpec
from zoo.mixers.moments import MomentMixer, apply_matrix, product, real_features
from zoo.mixers.options import MixerOptions, is_number


@dataclass(frozen=True)
class MesaOptions(MixerOptions):
    """Options of `mesa`. Raises ValueError for normalize, causal, center, mean_path and values that are not allowed.

    ridge: initial lambda relative to the mean of the diagonal of K'K, above 0
    """

    two_sided = True
    refused = ("normalize", "center", "mean_path")

    ridge: float = 0.1

    def __post_init__(self) -> None:
        if not is_number(self.ridge) or not 0 < self.ridge < math.inf:
            raise ValueError(f"ridge must be a positive number, since mesa inverts K'K + lambda I, got {self.ridge!r}")
        super().__post_init__()


class Mesa(MomentMixer):
    """Two-sided mesa layer o_t = q_t (K'K + lambda I)^-1 K'V with features q, k (MesaNet, arXiv 2506.05233, Eq. 6).

    `hla2` multiplies by K'K; the mesa layer divides by it, so that directions shared by many keys do not dominate.
    lambda is learned per head: initially `ridge` times the mean of the diagonal of K'K, and always at least 3e-4 times
    it (the square root of the float32 precision), so that the matrix is invertible. One Cholesky factorisation [D, D]
    per head, in float32.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; 3 N D^2 + D^3 multiplications per head. Rotary
    embeddings are applied to the features. Options: `MesaOptions`.
    """

    name = "mesa"
    defaults = MesaOptions(normalize=False)
    options: MesaOptions

    def __init__(self, layer: LayerSpec, options: MesaOptions) -> None:
        super().__init__(layer, options)
        self.log_ridge = nn.Parameter(torch.empty(layer.kv_heads, **layer.placement))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.log_ridge, math.log(self.options.ridge))

    def _mix(self, mask: Tensor | None, *tensors: Tensor) -> Tensor:
        if len(tensors) == 5:
            q, k, v, count = real_features("identity", mask, *tensors[2:])
        else:
            q, k, v, count = real_features(self._inner_map, mask, *self.split_qkv(*tensors))
        count = self.total_count(count, k)
        keys, pairs = (self.total(product(k, t)) / count for t in (k, v))
        energy = keys.diagonal(dim1=-2, dim2=-1).mean(-1)  # [B, Hk]
        limit = -0.5 * math.log(torch.finfo(energy.dtype).eps)
        ridge = self.log_ridge.to(energy.dtype).clamp(-limit, limit).exp() * energy + EPS
        eye = torch.eye(keys.shape[-1], device=keys.device, dtype=keys.dtype)
        factor, _ = torch.linalg.cholesky_ex(keys + ridge[..., None, None] * eye)
        half = torch.linalg.solve_triangular(factor, pairs, upper=False)  # cholesky_solve crashes in a CUDA graph
        return apply_matrix(q, torch.linalg.solve_triangular(factor.mT, half, upper=True))
