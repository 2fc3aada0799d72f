"""Turn counts into a bound on ε: Clopper-Pearson for one release, Steinke, Nasr & Jagielski (2023)
for one run.

Every bound has a confidence, and fails no more often than that says.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import beta, binom


def clopper_pearson(hits: np.ndarray, trials: int, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Return a lower and an upper bound on a probability; each fails with probability at most
    `alpha`.
    """
    hits = np.asarray(hits, dtype=float)
    with np.errstate(invalid="ignore"):
        lower = np.where(hits > 0, beta.ppf(alpha, hits, trials - hits + 1), 0.0)
        upper = np.where(hits < trials, beta.ppf(1 - alpha, hits + 1, trials - hits), 1.0)
    return lower, upper


def release_bound(
    hits: np.ndarray, false_alarms: np.ndarray, trials: int, delta: float, confidence: float
) -> np.ndarray:
    """Return the ε that a test with these counts refutes: (ε, δ)-DP demands P[hit] ≤ e^ε P[false
    alarm] + δ.
    """
    alpha = (1 - confidence) / 2
    hit = clopper_pearson(hits, trials, alpha)[0]
    alarm = clopper_pearson(false_alarms, trials, alpha)[1]
    return np.log(np.maximum((hit - delta) / alarm, 1.0))


def guess_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bound the probability of `right` or more right guesses if training is (ε, δ)-DP.

    Steinke et al. 2023, Theorem 5.2: P[V ≥ v] ≤ P[W ≥ v] + 2mδ·max_i P[v > W ≥ v − i]/i, with W ~
    Binomial(r, e^ε/(1 + e^ε)) for r guesses on m canaries.
    """
    if right == 0:
        return 1.0
    accuracy = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, accuracy))
    i = np.arange(1, right + 1)
    below = binom.cdf(right - 1, guesses, accuracy) - binom.cdf(right - i - 1, guesses, accuracy)
    return min(1.0, tail + 2 * canaries * delta * float(np.max(below / i)))  # P[v > W ≥ v − i] / i


def run_bound(canaries: int, guesses: int, right: int, delta: float, confidence: float) -> float:
    """Return the largest ε at which so many right guesses are less likely than 1 − confidence; 0 if
    none is refuted.
    """

    def refuted(epsilon: float) -> bool:
        return guess_p_value(canaries, guesses, right, epsilon, delta) <= 1 - confidence

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high) and high < 64:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def guess(
    scores: np.ndarray, included: np.ndarray, delta: float, confidence: float
) -> tuple[float, str]:
    """Guess 'in' for the highest eighth of the scores and 'out' for the lowest; return the bound
    and its evidence.

    The number of guesses is fixed beforehand. Trying several would cost confidence, and with it
    most of the bound, for the theorem's term 2mδ·(…) leaves little of it.
    """
    canaries = len(scores)
    each = max(1, canaries // 8)
    order = np.argsort(scores, kind="stable")
    right = int(included[order[-each:]].sum() + (~included[order[:each]]).sum())
    evidence = f"{right:,} of {2 * each:,} guesses right, {canaries:,} canaries"
    return run_bound(canaries, 2 * each, right, delta, confidence), evidence
