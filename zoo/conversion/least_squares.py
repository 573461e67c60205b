"""Least squares per head on a few terms, from normal equations summed over batches in float64."""

import torch
from torch import Tensor

MIN_EIGENVALUE = 1e-12  # smallest eigenvalue that the solution uses, relative to the largest


class NormalEquations:
    """Normal equations of min_w sum |o - sum_k w_k x_k|^2 per head, over tokens, channels and batches.

    gram: products of the K terms and the target (last), [H, K + 1, K + 1]. centred: the same products after subtraction
    of the token mean, so that only differences between tokens count.
    """

    def __init__(self, heads: int, terms: int) -> None:
        self.gram = torch.zeros(heads, terms + 1, terms + 1, dtype=torch.float64)
        self.centred = torch.zeros_like(self.gram)

    def add(self, terms: Tensor, target: Tensor) -> None:
        """Add a batch: terms [K, B, N, H, D], target [B, N, H, D]."""
        x = torch.cat([terms.double(), target.double()[None]])
        self.gram += _products(x)
        self.centred += _products(x - x.mean(2, keepdim=True))

    def solve(self) -> Tensor:
        """Solve for w [H, K]; the solution of least norm (for normalised terms) if terms are linearly dependent."""
        a, b = self.gram[:, :-1, :-1], self.gram[:, :-1, -1]
        size = a.diagonal(dim1=1, dim2=2).sqrt()
        inverse = torch.where(size > 0, 1 / size, 0)
        values, vectors = torch.linalg.eigh(a * inverse[:, :, None] * inverse[:, None, :])
        kept = values > MIN_EIGENVALUE * values.amax(-1, keepdim=True)
        scaled = torch.where(kept, 1 / values, 0) * (vectors.mT @ (b * inverse)[:, :, None])[..., 0]
        return (vectors @ scaled[:, :, None])[..., 0] * inverse

    def errors(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return (sum |o - sum_k w_k x_k|^2, sum |o|^2) per head, [H] each."""
        return _errors(self.gram, weights)

    def centred_errors(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return `errors` after subtraction of the token mean."""
        return _errors(self.centred, weights)


def _products(x: Tensor) -> Tensor:
    x = x.permute(3, 0, 1, 2, 4).flatten(2)  # [H, K + 1, B N D]
    return (x @ x.mT).cpu()


def _errors(gram: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    w = torch.cat([-weights, torch.ones_like(weights[:, :1])], 1)
    return (w[:, None] @ gram @ w[:, :, None])[:, 0, 0].clamp(min=0), gram[:, -1, -1]


def r_squared(errors: Tensor, powers: Tensor) -> Tensor:
    """Compute 1 - error / power elementwise, or 1 where the power is 0."""
    return torch.where(powers > 0, 1 - errors / powers, 1.0)
