"""Sentences below a table: which of its rows differ by more than chance.

Every pair of rows that ran on the same data is compared. ROC-AUCs are compared by DeLong's test on
the same test examples, seed by seed; of all seeds the largest p counts, so that no lucky seed makes
a difference. Other metrics are compared over seeds by Student's t-test. Both are held to
Bonferroni's threshold. These are the tests of Ziller et al. 2021 (deepee, Statistical methods).
scipy and scikit-learn have no DeLong test; ours is checked against the worked example that the
SAS/STAT manual prints for the data of DeLong, DeLong & Clarke-Pearson 1988.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zdp_bench import records
from zdp_bench.errors import require
from zdp_bench.lazy import LazyModule
from zdp_bench.privacy.memory import remember
from zdp_bench.records import Record

special = LazyModule("scipy.special")
stats = LazyModule("scipy.stats")

LARGEST = 4  # rows; ten activations would make 45 pairs


def compare_pairs(metric: str, rows: Mapping[str, Sequence[Record]], results: Path) -> list[str]:
    """Return the range of every row with several seeds, then the comparison of every pair.

    There are no sentences for more than four rows, or one.
    """
    if not 2 <= len(rows) <= LARGEST:
        return []
    said = []
    for label, runs in rows.items():
        values = [run.metrics[metric] for run in runs]
        if len(values) > 1 and not any(map(math.isnan, values)):
            spread = f"{min(values):.3f} to {max(values):.3f} over {len(values)} seeds"
            said.append(f"{label}: mean {sum(values) / len(values):.3f}, range {spread}.")
    pairs = list(combinations(rows, 2))
    threshold = bonferroni(len(pairs))
    family = f"{len(pairs)} comparison{'s' if len(pairs) > 1 else ''}"
    for first, second in pairs:
        test, p, seeds = compare_rows(metric, rows[first], rows[second], results)
        if not math.isnan(p):
            verdict = "different" if p < threshold else "not shown to be different"
            said.append(
                f"{first} against {second}: {verdict}, {test} p {show_p(p)} (seeds "
                f"{', '.join(map(str, seeds))}; threshold {threshold:.3g} for {family})."
            )
        elif seeds:
            said.append(
                f"{first} against {second}: cannot be tested, for the values differ and have no "
                f"variance (seeds {', '.join(map(str, seeds))}). Use more seeds or test examples."
            )
    return said


def compare_rows(
    metric: str, first: Sequence[Record], second: Sequence[Record], results: Path
) -> tuple[str, float, list[int]]:
    """Return the test's name, p and the seeds compared: none, and a p of NaN, where nothing can be.

    p is NaN with seeds where what differs has no variance.
    """
    if metric != "roc_auc":
        values = [[run.metrics[metric] for run in runs] for runs in (first, second)]
        if min(map(len, values)) < 2 or bool(np.isnan(np.concatenate(values)).any()):
            return "Student's t", math.nan, []
        seeds = {run.seed for run in (*first, *second)}
        return "Student's t", students_t(*values), sorted(seeds)
    p_of_seed = {}
    for a, b in product(first, second):
        if a.seed == b.seed and a.data.test == b.data.test:
            one, other = _scores(a, results), _scores(b, results)
            # a ROC-AUC of less than two examples of a class has no variance to compare
            if (
                one
                and other
                and (one[0] == other[0]).all()
                and 2 <= one[0].sum() <= len(one[0]) - 2
            ):
                p_of_seed[a.seed] = delong(one[0], one[1], other[1]).p
    untested = any(map(math.isnan, p_of_seed.values()))
    p = math.nan if untested else max(p_of_seed.values(), default=math.nan)
    return "DeLong", p, sorted(p_of_seed)


def _scores(run: Record, results: Path) -> tuple[np.ndarray, np.ndarray] | None:
    path = records.folder(results, run.recipe, run.run) / "scores.csv"
    return _read_once(path) if path.is_file() else None


_read_once = cache(records.read_scores)  # a run stands in many pairs


def show_p(p: float) -> str:
    """'= 0.0123', '< 0.001'; '= NaN (no variance)' of what cannot be tested."""
    if math.isnan(p):
        return "= NaN (no variance)"
    return "< 0.001" if p < 0.001 else f"= {p:.3g}"


SIGNIFICANT = 0.05


class DeLong(NamedTuple):
    """Two correlated ROC curves: areas, standard errors of each and of their difference, z, p."""

    areas: tuple[float, float]
    errors: tuple[float, float]
    error: float
    z: float
    p: float  # two-sided


def delong(truth: np.ndarray, first: np.ndarray, second: np.ndarray) -> DeLong:
    """Compare the areas under two ROC curves of the SAME examples.

    DeLong, DeLong & Clarke-Pearson 1988, by midranks (Sun & Xu 2014), so in O(n log n). z = 0 and
    p = 1 for two curves that differ nowhere, and where the difference has no variance because both
    separate perfectly. z and p are NaN for areas that differ without a variance.

    Args:
        truth: 0 or 1 [n].
        first, second: scores [n], higher for class 1.
    """
    truth = np.asarray(truth).astype(bool)
    ill, well = int(truth.sum()), int((~truth).sum())
    lengths = len(first), len(second)
    same = lengths == (len(truth), len(truth))
    require(same, "DeLong test", lengths, "both need a score for each example")
    require(min(ill, well) >= 2, "DeLong test", (ill, well), "needs two examples of each class")
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
        z = 0.0 if abs(difference) < 1e-12 else math.nan
    errors = math.sqrt(covariance[0, 0]), math.sqrt(covariance[1, 1])
    return DeLong((areas[0], areas[1]), errors, error, z, float(2 * special.ndtr(-abs(z))))


def _placements(truth: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of class 0 below each of class 1, and of class 1 above each of class 0."""

    ill, well = scores[truth], scores[~truth]
    every = _midranks(scores)
    below = (every[truth] - _midranks(ill)) / len(well)
    return below, 1 - (every[~truth] - _midranks(well)) / len(ill)


def _midranks(scores: np.ndarray) -> np.ndarray:
    """Return the rank of each score from 1; equal ones share the mean of theirs."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place]


def students_t(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Student's two-sided p, variances taken as equal.

    NaN below two values on a side, and for values that differ without a variance.
    """
    if min(len(first), len(second)) < 2:
        return math.nan
    if len(set(first)) == 1 == len(set(second)):  # no spread: scipy would divide by zero
        return 1.0 if first[0] == second[0] else math.nan
    p: float = remember(_p_of_independent, list(first), list(second))  # scipy takes a second
    return p


def _p_of_independent(first: Sequence[float], second: Sequence[float]) -> float:
    with warnings.catch_warnings(
        action="ignore", category=RuntimeWarning
    ):  # of nearly equal values
        return float(stats.ttest_ind(first, second).pvalue)


class Paired(NamedTuple):
    """A paired t-test: the mean difference, its 95 % confidence interval, and the two-sided p.

    All but the mean are NaN for differences without a variance.
    """

    mean: float
    low: float
    high: float
    p: float


def paired_t(first: Sequence[float], second: Sequence[float]) -> Paired | None:
    """Compare two rows of the same seeds, in one order: first − second. None for fewer than two."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    if len(differences) < 2:
        return None
    mean = sum(differences) / len(differences)
    if len(set(differences)) == 1:  # no spread: scipy would divide by zero
        return Paired(0.0, 0.0, 0.0, 1.0) if mean == 0 else Paired(mean, *[math.nan] * 3)
    return Paired(mean, *remember(_interval_and_p, differences))


def _interval_and_p(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return a 95 % confidence interval of the mean, and the two-sided p of a mean of 0."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        found = stats.ttest_1samp(differences, 0.0)
        interval = found.confidence_interval()
    return float(interval.low), float(interval.high), float(found.pvalue)


def bonferroni(comparisons: int) -> float:
    """Return the threshold of p in a family: 0.0167 for three, which the paper prints as 0.016."""
    return SIGNIFICANT / max(1, comparisons)
