"""The tests by which Ziller et al. 2021 (deepee, Statistical methods) compare numbers.

DeLong's for ROC-AUCs of the same examples, Student's t for times and other continuous values, and
Bonferroni's correction. scipy and scikit-learn have no DeLong test, and no well-kept package does;
ours is checked against the worked example that the SAS/STAT manual prints for the data of DeLong,
DeLong & Clarke-Pearson 1988.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from zdp_bench.errors import require

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class DeLong:
    """Two correlated ROC curves: areas, standard errors of each and of their difference, z, p.

    p is two-sided.
    """

    areas: tuple[float, float]
    errors: tuple[float, float]
    error: float
    z: float
    p: float


def delong(truth: np.ndarray, first: np.ndarray, second: np.ndarray) -> DeLong:
    """Compare the areas under two ROC curves of the SAME examples.

    DeLong, DeLong & Clarke-Pearson 1988, by midranks (Sun & Xu 2014), so in O(n log n). z = 0 and
    p = 1 for two curves that differ nowhere, and where the difference has no variance because both
    separate perfectly.

    Args:
        truth: 0 or 1 [n].
        first, second: scores [n], higher for class 1.

    Raises:
        UserError: the lengths differ, or a class has fewer than two examples.
    """
    truth = np.asarray(truth).astype(bool)
    ill, well = int(truth.sum()), int((~truth).sum())
    lengths = len(first), len(second)
    same = lengths == (len(truth), len(truth))
    require(same, "DeLong test", lengths, "both need a score for each record")
    require(min(ill, well) >= 2, "DeLong test", (ill, well), "needs two records of each class")
    placements = [_placements(truth, np.asarray(scores, dtype=float)) for scores in (first, second)]
    areas = [float(above.mean()) for above, _ in placements]
    covariance = np.cov(np.stack([above for above, _ in placements])) / ill
    covariance = covariance + np.cov(np.stack([below for _, below in placements])) / well  # [2, 2]
    variance = float(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    error = math.sqrt(max(variance, 0.0))
    difference = areas[0] - areas[1]
    if error > 1e-12:
        z = difference / error
    else:
        z = 0.0 if abs(difference) < 1e-12 else math.copysign(math.inf, difference)
    errors = math.sqrt(covariance[0, 0]), math.sqrt(covariance[1, 1])
    return DeLong((areas[0], areas[1]), errors, error, z, float(2 * ndtr(-abs(z))))


def _placements(truth: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of class 0 below each of class 1, and of class 1 above each of class 0."""
    from scipy.stats import rankdata  # here, for it takes half a second

    ill, well = scores[truth], scores[~truth]
    every = rankdata(scores)  # midranks: ties count one half
    below = (every[truth] - rankdata(ill)) / len(well)
    return below, 1 - (every[~truth] - rankdata(well)) / len(ill)


def students_t(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided p of Student's t-test for equal means, equal variances assumed.

    NaN with fewer than two values on a side.
    """
    if min(len(first), len(second)) < 2:
        return math.nan
    if len(set(first)) == 1 == len(set(second)):  # no spread: scipy would divide by zero
        return 1.0 if first[0] == second[0] else 0.0
    from scipy.stats import ttest_ind

    # scipy warns of nearly equal values
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return float(ttest_ind(first, second).pvalue)


def bonferroni(comparisons: int) -> float:
    """Return the threshold of p in a family of comparisons.

    0.0167 for three, which the paper prints as 0.016.
    """
    return SIGNIFICANT / max(1, comparisons)
