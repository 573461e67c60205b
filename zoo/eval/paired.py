"""Difference of two accuracies on the same images, with a confidence interval."""

from dataclasses import dataclass
from math import sqrt

import numpy as np

NORMAL_95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution


@dataclass(frozen=True)
class PairedDifference:
    """accuracy(b) - accuracy(a) in percent, with its 95 % interval; only_a, only_b: numbers of images that only one of
    them classified correctly."""

    difference: float
    low: float
    high: float
    only_a: int
    only_b: int
    images: int

    def __str__(self) -> str:
        return f"{self.difference:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def paired_difference(a: np.ndarray, b: np.ndarray) -> PairedDifference:
    """The difference of two accuracies with its paired 95 % interval; a, b: bool [N], correct or not, same images.

    The differences b - a take the values -1, 0, 1, so their mean has the standard error
    sqrt(only_a + only_b - (only_b - only_a)^2 / N) / N (Wald's interval for matched pairs). Half an image is added to
    both discordant counts (Agresti and Min, 2005), so that the interval stays valid when a and b are almost equal.
    Raises ValueError for arrays of different length.
    """
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise ValueError(f"paired results need two lists of the same images, got {len(a)} and {len(b)}")
    n = len(a)
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    difference = (only_b - only_a) / n
    total = n + 2
    discordant, shift = only_a + only_b + 1, only_b - only_a
    centre = shift / total
    half = NORMAL_95 * sqrt(discordant - shift**2 / total) / total
    return PairedDifference(100 * difference, 100 * (centre - half), 100 * (centre + half), only_a, only_b, n)
