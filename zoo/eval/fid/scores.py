"""Frechet distance, KID, precision and recall of two sets of features; Inception score of one set.

The Frechet distance is computed here, from moments in float64. Torch-fidelity computes the other scores, from float64
features.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from zoo.eval.fid.statistics import Gaussian, Moments

Scores = dict[str, float]
NEIGHBOURS = 3  # nearest neighbours of precision and recall, as in Kynkaanniemi et al. 2019 and ADM
KID_SUBSETS, KID_SUBSET_SIZE = 100, 1000  # number of random subsets and of images per subset (Binkowski et al. 2018)
SPLITS = 10  # splits of the Inception score, of 5000 images each for 50,000 samples, as in ADM
EXTRAPOLATION_SIZES = 6  # number of sample sizes in the fit
SCORE_SEED = 2020  # default of torch-fidelity


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """Compute the Frechet distance of two Gaussians with the covariances A and B, in float64 (Heusel et al. 2017, eq.
    6): |mean_a - mean_b|^2 + tr(A + B - 2 (A^1/2 B A^1/2)^1/2).

    Matrix roots are computed from eigenvalues clipped at 0, so that they are real, also for singular covariances.
    Raises ValueError for Gaussians of different dimension.
    """
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"the features have {len(a.mean)} and {len(b.mean)} dimensions: of two extractors?")
    values, vectors = torch.linalg.eigh(a.covariance)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    cross = torch.linalg.eigvalsh(root @ b.covariance @ root).clamp(min=0).sqrt().sum()
    distance = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace() - 2 * cross
    return float(distance)


@dataclass(frozen=True)
class Extrapolation:
    """Frechet distances for increasing numbers of samples n, and the limit of a linear fit in 1/n at 1/n = 0."""

    sizes: list[int]
    distances: list[float]
    limit: float


def extrapolate(features: Tensor, reference: Gaussian) -> Extrapolation | None:
    """Extrapolate the Frechet distance of features [N, D] to N = infinity (Chong and Forsyth 2020).

    The fit uses nested random subsets, from half of the samples to all. Returns None if too few subsets have more than
    D samples, below which the bias is not proportional to 1/N. The bias from the reference remains.
    """
    n, dim = features.shape
    smallest = max(n // 2, dim + 1)
    if smallest > 0.8 * n:
        return None
    sizes = [int(s) for s in np.linspace(smallest, n, EXTRAPOLATION_SIZES)]
    order = torch.from_numpy(np.random.default_rng(SCORE_SEED).permutation(n))
    moments, done, distances = Moments(dim), 0, []
    for size in sizes:
        moments.update(features[order[done:size]])
        done = size
        distances.append(frechet_distance(moments.gaussian(), reference))
    _, limit = np.polyfit(1 / np.array(sizes), distances, 1)
    return Extrapolation(sizes, distances, float(limit))


def kernel_distance(samples: Tensor, reference: Tensor) -> Scores:
    """Compute the KID of features [N, D]: mean and standard deviation over random subsets of the unbiased MMD^2 with
    the kernel (x.y / D + 1)^3."""
    size = min(KID_SUBSET_SIZE, len(samples), len(reference))
    options = {"kid_subsets": KID_SUBSETS, "kid_subset_size": size, "rng_seed": SCORE_SEED, "verbose": False}
    found = require_torch_fidelity().kid(samples.double(), reference.double(), **options)
    mean, deviation = (found[f"kernel_inception_distance_{k}"] for k in ("mean", "std"))
    return {"kid": mean, "kid_std": deviation, "subsets": KID_SUBSETS, "subset_size": size}


def precision_recall(samples: Tensor, reference: Tensor, batch: int = 1000) -> Scores:
    """Compute improved precision and recall of features [N, D] with 3 nearest neighbours, in [0, 1]."""
    found = require_torch_fidelity().prc(
        samples.double(),
        reference.double(),
        prc_neighborhood=NEIGHBOURS,
        prc_batch_size=batch,
        save_cpu_ram=True,  # without it, three N x N matrices are kept in memory
        verbose=False,
    )
    counts = {"neighbours": NEIGHBOURS, "samples": len(samples), "reference": len(reference)}
    return {"precision": found["precision"], "recall": found["recall"], **counts}


def inception_score(logits: Tensor) -> Scores:
    """Compute the Inception score of logits [N, C]: mean and standard deviation of exp(E KL(p(y|x) || p(y))) over 10
    random splits."""
    found = require_torch_fidelity().isc(logits, SPLITS, True, SCORE_SEED)
    mean, deviation = (found[f"inception_score_{k}"] for k in ("mean", "std"))
    return {"inception_score": mean, "inception_score_std": deviation, "splits": SPLITS}


def require_torch_fidelity() -> SimpleNamespace:
    """Import the functions `kid`, `prc` and `isc` of torch-fidelity. Raises ValueError if it is not installed."""
    try:
        from torch_fidelity.metric_isc import isc_features_to_metric
        from torch_fidelity.metric_kid import kid_features_to_metric
        from torch_fidelity.metric_prc import prc_features_to_metric
    except ImportError as error:
        raise ValueError("scores need the package torch-fidelity: pip install 'hla-zoo[eval]'") from error
    return SimpleNamespace(kid=kid_features_to_metric, prc=prc_features_to_metric, isc=isc_features_to_metric)
