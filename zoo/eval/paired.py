"""Paired difference of two accuracies on the same images, with a confidence interval."""

from math import sqrt
from typing import NamedTuple

import numpy as np

NORMAL_95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution


class PairedDifference(NamedTuple):
    """Difference of two accuracies, accuracy(b) - accuracy(a), and its 95 % confidence interval, in percentage
    points."""

    difference: float
    low: float
    high: float


def paired_difference(a: np.ndarray, b: np.ndarray) -> PairedDifference:
    """Compute the difference of two accuracies with its paired 95 % interval.

    a, b: whether each image was classified correctly, bool [N], on the same images. Raises ValueError for arrays of
    different length.

    The differences b - a per image are -1, 0 or 1, so that their mean has the standard error
    sqrt(only_a + only_b - (only_b - only_a)^2 / N) / N (Wald's interval for matched pairs), where only_a images are
    correct in a alone. As in Agresti and Min (2005), 0.5 is added to only_a and to only_b, so that the interval stays
    valid if a and b are almost equal.
    """
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise ValueError(f"paired results need two lists of the same images, got {len(a)} and {len(b)}")
    n = len(a)
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    discordant, shift, total = only_a + only_b + 1, only_b - only_a, n + 2
    centre = shift / total
    half = NORMAL_95 * sqrt(discordant - shift**2 / total) / total
    return PairedDifference(100 * (shift / n), 100 * (centre - half), 100 * (centre + half))
