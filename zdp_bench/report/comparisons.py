"""Sentences below a table: which of its rows differ by more than chance.

Every pair of rows that ran on the same data is compared. ROC-AUCs are compared by DeLong's test on
the same test examples, one seed at a time. The largest p of all seeds is reported, so that one
lucky seed does not make a difference significant. Other metrics are compared over seeds by
Student's t-test. Both use Bonferroni's threshold. These are the tests of Ziller et al. 2021
(deepee, Statistical methods).
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
from statistics import mean
from typing import NamedTuple

import numpy as np

from zdp_bench import records
from zdp_bench.errors import UserError, require
from zdp_bench.foreign_files import is_file
from zdp_bench.lazy import LazyModule
from zdp_bench.privacy.memory import call_cached
from zdp_bench.records import Record

special = LazyModule("scipy.special")
stats = LazyModule("scipy.stats")

ROUNDING = 1e-6  # relative; many metrics are rounded to float32
MAX_ROWS = 4  # ten activations would make 45 pairs


def compare_pairs(metric: str, rows: Mapping[str, Sequence[Record]], results: Path) -> list[str]:
    """Return sentences: the range of each row with several seeds, then each pair's comparison.

    The list is empty for one row, and for more than four.
    """
    if not 2 <= len(rows) <= MAX_ROWS:
        return []
    sentences = []
    for label, runs in rows.items():
        values = [run.metrics[metric] for run in runs]
        if len(values) > 1 and all(map(math.isfinite, values)):
            spread = f"{min(values):.3f} to {max(values):.3f} over {len(values)} seeds"
            sentences.append(f"{label}: mean {mean(values):.3f}, range {spread}.")
    pairs = list(combinations(rows, 2))
    threshold = bonferroni(len(pairs))
    plural = "s" if len(pairs) > 1 else ""
    family = f"{len(pairs)} comparison{plural}"
    for first, second in pairs:
        result = compare_rows(metric, rows[first], rows[second], results)
        seeds = ", ".join(map(str, result.seeds))
        if not math.isnan(result.p):
            verdict = "different" if result.p < threshold else "not shown to be different"
            sentences.append(
                f"{first} against {second}: {verdict}, {result.test} p {show_p(result.p)} (seeds "
                f"{seeds}; threshold {show_threshold(threshold)} for {family})."
            )
        elif result.seeds:
            sentences.append(
                f"{first} against {second}: cannot be tested, because the values differ but have "
                f"no variance (seeds {seeds}). Use more seeds or test examples."
            )
    return sentences


class Compared(NamedTuple):
    """The comparison of two rows of a table by a statistical test.

    Attributes:
        test: name of the test.
        p: two-sided p. NaN if nothing can be tested, or if the values differ without a variance.
        seeds: the seeds that were compared. Empty if nothing can be tested.
    """

    test: str
    p: float
    seeds: list[int]


def compare_rows(
    metric: str, first: Sequence[Record], second: Sequence[Record], results: Path
) -> Compared:
    """Compare two rows by the test that fits their metric."""
    if metric == "roc_auc":
        return _compare_curves(first, second, results)
    values = [run.metrics[metric] for run in first]
    other_values = [run.metrics[metric] for run in second]
    all_finite = all(map(math.isfinite, (*values, *other_values)))
    if min(len(values), len(other_values)) < 2 or not all_finite:
        return Compared("Student's t", math.nan, [])
    seeds = {run.seed for run in (*first, *second)}
    return Compared("Student's t", students_t(values, other_values), sorted(seeds))


def _compare_curves(first: Sequence[Record], second: Sequence[Record], results: Path) -> Compared:
    """Compare ROC-AUCs on the same test examples, one seed at a time; keep the largest p."""
    p_of_seed = {}
    for run, other_run in product(first, second):
        if run.seed != other_run.seed or run.data.test != other_run.data.test:
            continue
        scores, other_scores = _read_scores(run, results), _read_scores(other_run, results)
        if scores is None or other_scores is None:
            continue
        truth, other_truth = scores[0], other_scores[0]
        # With fewer than two examples of a class, a ROC-AUC has no variance.
        has_variance = 2 <= truth.sum() <= len(truth) - 2
        if has_variance and np.array_equal(truth, other_truth):
            p_of_seed[run.seed] = delong(truth, scores[1], other_scores[1]).p
    p = math.nan
    if p_of_seed and not any(map(math.isnan, p_of_seed.values())):
        p = max(p_of_seed.values())
    return Compared("DeLong", p, sorted(p_of_seed))


def _read_scores(run: Record, results: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the true class and the score of each test example; None if the run saved none."""
    path = records.folder(results, run.recipe, run.run) / "scores.csv"
    scores = _read_once(path) if is_file(path) else None
    if scores is not None and run.data.test not in (None, len(scores[0])):
        raise UserError(
            f"{path}: has {len(scores[0])} scores of {run.data.test} test examples; it is damaged."
        )
    return scores


_read_once = cache(records.read_scores)  # a run is in many pairs


def show_p(p: float) -> str:
    """Return p as '= 0.0123' or '< 0.001', and NaN as '= NaN (no variance)'."""
    if math.isnan(p):
        return "= NaN (no variance)"
    return "< 0.001" if p < 0.001 else f"= {p:.3g}"


def show_threshold(threshold: float) -> str:
    """Return a threshold of p with as many digits as `show_p`, so that readers can compare them."""
    return f"{threshold:.3g}"


SIGNIFICANT = 0.05


class DeLong(NamedTuple):
    """The result of DeLong's test on two ROC curves of the same examples.

    Attributes:
        areas: area under each curve.
        errors: standard error of each area.
        error: standard error of the difference of the areas.
        z: the difference divided by its standard error.
        p: two-sided p.
    """

    areas: tuple[float, float]
    errors: tuple[float, float]
    error: float
    z: float
    p: float


def delong(truth: np.ndarray, first: np.ndarray, second: np.ndarray) -> DeLong:
    """Compare the areas under two ROC curves of the same examples.

    The test of DeLong, DeLong & Clarke-Pearson 1988, computed from midranks in O(n log n) (Sun & Xu
    2014). If the difference has no variance, z = 0 and p = 1 for equal areas, and both are NaN for
    others.

    Args:
        truth: class of each example, 0 or 1, [n].
        first, second: scores [n], higher for class 1.

    Raises:
        UserError: A class has fewer than two examples, or an example has no score.
    """
    truth = np.asarray(truth).astype(bool)
    positives = int(truth.sum())
    negatives = len(truth) - positives
    lengths = len(first), len(second)
    has_all_scores = lengths == (len(truth), len(truth))
    require(has_all_scores, "DeLong test", lengths, "both need a score for each example")
    has_variance = min(positives, negatives) >= 2
    counts = positives, negatives
    require(has_variance, "DeLong test", counts, "needs two examples of each class")
    below, above = _placements(truth, np.asarray(first, dtype=float))
    other_below, other_above = _placements(truth, np.asarray(second, dtype=float))
    areas = float(below.mean()), float(other_below.mean())
    covariance = np.cov(np.stack([below, other_below])) / positives  # [2, 2]
    covariance += np.cov(np.stack([above, other_above])) / negatives
    variances = covariance.diagonal()
    variance_of_difference = float(variances.sum() - 2 * covariance[0, 1])
    error = math.sqrt(max(variance_of_difference, 0.0))
    difference = areas[0] - areas[1]
    if error > 1e-12:
        z = difference / error
    else:  # no variance
        z = 0.0 if abs(difference) < 1e-12 else math.nan
    p = float(2 * special.ndtr(-abs(z)))
    errors = math.sqrt(variances[0]), math.sqrt(variances[1])
    return DeLong(areas, errors, error, z, p)


def _placements(truth: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each example's score lies among the scores of the other class.

    Returns:
        For each example of class 1, the fraction of class 0 with a lower score. For each example of
        class 0, the fraction of class 1 with a higher score. Equal scores count one half.
    """
    positives, negatives = scores[truth], scores[~truth]
    ranks = _midranks(scores)
    below = (ranks[truth] - _midranks(positives)) / len(negatives)
    above = 1 - (ranks[~truth] - _midranks(negatives)) / len(positives)
    return below, above


def _midranks(scores: np.ndarray) -> np.ndarray:
    """Return the rank of each score, from 1. Equal scores get the mean of their ranks."""
    _, group, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[group]


def students_t(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided p of Student's t-test, which assumes equal variances.

    It is NaN if a side has fewer than two values, if a value is not finite, and if the values
    differ without a variance.
    """
    if min(len(first), len(second)) < 2:
        return math.nan
    error = _rounding_error(first, second)
    if _spread(first) <= error and _spread(second) <= error:  # scipy would divide by zero
        return 1.0 if abs(first[0] - second[0]) <= error else math.nan
    # Remembered, because importing scipy takes a second.
    p: float = call_cached(_p_of_independent, list(first), list(second))
    return p


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def _rounding_error(first: Sequence[float], second: Sequence[float]) -> float:
    """Return how far values may be apart, or differ in their differences, only by rounding.

    It is NaN, which no spread is below, if a value is not finite.
    """
    values = (*first, *second)
    return ROUNDING * max(map(abs, values)) if all(map(math.isfinite, values)) else math.nan


def _p_of_independent(first: Sequence[float], second: Sequence[float]) -> float:
    # scipy warns if values are nearly equal
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return float(stats.ttest_ind(first, second).pvalue)


class Paired(NamedTuple):
    """The result of a paired t-test.

    Attributes:
        mean_difference: mean of the differences first − second.
        low, high: 95 % confidence interval of the mean difference.
        p: two-sided p. Like the interval, it is NaN if equal differences other than 0 have no
            variance.
    """

    mean_difference: float
    low: float
    high: float
    p: float


def paired_t(first: Sequence[float], second: Sequence[float]) -> Paired | None:
    """Return the paired t-test of first − second; None for fewer than two values.

    Args:
        first, second: one value per seed, in the same order of seeds.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    if len(differences) < 2:
        return None
    difference = sum(differences) / len(differences)
    error = _rounding_error(first, second)
    if not _spread(differences) <= error:  # also if it is NaN
        return Paired(difference, *call_cached(_interval_and_p, differences))
    # No spread: scipy would divide by zero, or by a rounding error.
    if abs(difference) <= error:
        return Paired(0.0, 0.0, 0.0, 1.0)
    return Paired(difference, math.nan, math.nan, math.nan)


def _interval_and_p(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the 95 % confidence interval of the mean, and the two-sided p for a mean of 0."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        test = stats.ttest_1samp(differences, 0.0)
        interval = test.confidence_interval()
    return float(interval.low), float(interval.high), float(test.pvalue)


def bonferroni(comparisons: int) -> float:
    """Return Bonferroni's threshold: 0.0167 for three comparisons (the paper prints 0.016)."""
    return SIGNIFICANT / max(1, comparisons)
