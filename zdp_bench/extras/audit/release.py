"""Attack one release: draw many releases of two neighbouring sums, and test which is which.

The adversary does not know what is wrong with the mechanism, and looks at a release in three ways:

    projection   along the direction with the least noise, for the covariance that was learned
    distance     how far it is from 0, where an update starts, and from the mean release
    atom         how many of its numbers are exactly those of other releases, and how many occur
                 twice in it: a step that is left out, a constant, noise that comes again

A part of the releases teaches each of them how to score a release, a threshold, and what to say on
which side of it; the others test. The errors that the confidence allows are split between the
three, so that the best of the three bounds holds with that confidence.

Counts become a bound on ε by Clopper-Pearson for one release, and by Steinke, Nasr & Jagielski
(2023) for a whole run. Every bound has a confidence, and fails no more often than that says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from scipy.stats import beta, binom, mode
from torch import Tensor


@dataclass(frozen=True)
class Finding:
    """One attack and its result."""

    case: str
    claim: str
    epsilon_claimed: float
    lower_bound: float
    delta: float
    confidence: float
    evidence: str

    @property
    def verdict(self) -> Literal["passes", "flagged"]:
        return "flagged" if self.lower_bound > self.epsilon_claimed else "passes"


# ----------------------------------------------------------------------------- bounds from counts


def clopper_pearson(
    hits: np.ndarray,
    trials: int,
    alpha: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds on a probability; each fails with probability at most `alpha`."""
    hits = np.asarray(hits, dtype=float)
    misses = trials - hits
    with np.errstate(invalid="ignore"):
        lower = beta.ppf(alpha, hits, misses + 1)
        upper = beta.ppf(1 - alpha, hits + 1, misses)
    return np.where(hits > 0, lower, 0.0), np.where(misses > 0, upper, 1.0)


def release_bound(
    hits: np.ndarray,
    false_alarms: np.ndarray,
    trials: int,
    delta: float,
    confidence: float,
) -> np.ndarray:
    """Return the ε these counts refute: (ε, δ)-DP has P[hit] ≤ e^ε P[false alarm] + δ."""
    alpha = (1 - confidence) / 2
    least_hit, _ = clopper_pearson(hits, trials, alpha)
    _, most_alarm = clopper_pearson(false_alarms, trials, alpha)
    ratio = (least_hit - delta) / most_alarm
    return np.log(np.maximum(ratio, 1.0))


def guess_p_value(
    canaries: int,
    guesses: int,
    right: int,
    epsilon: float,
    delta: float,
) -> float:
    """Bound the probability of `right` or more right guesses if training is (ε, δ)-DP.

    Steinke et al. 2023, Theorem 5.2: P[V ≥ v] ≤ P[W ≥ v] + 2mδ·max_i P[v > W ≥ v − i]/i, with W ~
    Binomial(r, e^ε/(1 + e^ε)) for r guesses on m canaries.
    """
    if right == 0:
        return 1.0
    correct = binom(guesses, 1 / (1 + math.exp(-epsilon)))
    tail = float(correct.sf(right - 1))
    i = np.arange(1, right + 1)
    between = correct.cdf(right - 1) - correct.cdf(right - i - 1)  # P[v > W ≥ v − i]
    return min(1.0, tail + 2 * canaries * delta * float(np.max(between / i)))


def run_bound(
    canaries: int,
    guesses: int,
    right: int,
    delta: float,
    confidence: float,
) -> float:
    """Return the largest ε at which so many right guesses are less likely than 1 − confidence."""

    def is_refuted(epsilon: float) -> bool:
        return guess_p_value(canaries, guesses, right, epsilon, delta) <= 1 - confidence

    if not is_refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while is_refuted(high) and high < 64:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        if is_refuted(middle):
            low = middle
        else:
            high = middle
    return low


def guess(
    scores: np.ndarray,
    included: np.ndarray,
    delta: float,
    confidence: float,
) -> tuple[float, str]:
    """Guess 'in' for the highest eighth of the scores, 'out' for the lowest.

    The number of guesses is fixed beforehand. Trying several would cost confidence, and with it
    most of the bound, for the theorem's term 2mδ·(…) leaves little of it.

    Args:
        scores: of each canary, [canaries].
        included: whether it was in the training set, [canaries].

    Returns:
        the lower bound on ε, and the counts behind it.
    """
    canaries = len(scores)
    eighth = max(1, canaries // 8)
    order = np.argsort(scores, kind="stable")
    right_in = included[order[-eighth:]].sum()
    right_out = (~included[order[:eighth]]).sum()
    right = int(right_in + right_out)
    bound = run_bound(canaries, 2 * eighth, right, delta, confidence)
    return bound, f"{right:,} of {2 * eighth:,} guesses right, {canaries:,} canaries"


# ---------------------------------------------------------------------- the attack on one release

# A Gaussian release with multiplier z claims an ε for EVERY δ. At this one its attack shows most:
# the likeliest outcomes decide.
RELEASE_DELTA = 0.01
LEARNED = 0.25  # the share of trials that teach direction and threshold; the rest is the test
# Fine faults show in a projection, which gets most; what the others find is mostly coarse.
SHARES = {"projection": 0.5, "distance": 0.25, "atom": 0.25}

# (is the example present?, releases) -> [releases, d] real coordinates, every call with fresh noise
Release = Callable[[bool, int], Tensor]
Views = dict[str, np.ndarray]  # a key of SHARES -> [releases, features]


@dataclass(frozen=True)
class Scores:
    """What an attack sees of each release: one number, for each neighbour's releases."""

    without: np.ndarray
    with_it: np.ndarray


@dataclass(frozen=True)
class DecisionRule:
    """Guesses `present`, or absent, where the score is above the threshold (or not)."""

    threshold: float
    above: bool
    present: bool

    def count_guesses(self, scores: np.ndarray) -> int:
        """Return for how many scores the rule makes its guess."""
        return int(((scores > self.threshold) == self.above).sum())


def attack_release(
    release: Release,
    trials: int,
    delta: float,
    confidence: float,
    shift: np.ndarray | None = None,
) -> tuple[float, str]:
    """Attack releases of two neighbours.

    Args:
        release: draws releases of either neighbour.
        trials: releases of each neighbour.
        shift: the difference of the neighbours' sums, [d], if the adversary knows it; else it is
            learned.

    Returns:
        the lower bound on ε, and the counts behind it.
    """
    without = release(False, trials).double().numpy()
    with_it = release(True, trials).double().numpy()
    learned = max(2, round(LEARNED * trials))
    taught = np.concatenate([without[:learned], with_it[:learned]])
    mean = taught.mean(axis=0)
    repeated_without = find_repeated(without[:learned])
    repeated_with_it = find_repeated(with_it[:learned])

    def look(rows: np.ndarray) -> Views:
        distances = [
            np.linalg.norm(rows, axis=1),
            np.linalg.norm(rows - mean, axis=1),
        ]
        atoms = [
            (rows == repeated_without).sum(axis=1),
            (rows == repeated_with_it).sum(axis=1),
            count_repeats(rows),
        ]
        return {
            "projection": rows,
            "distance": np.stack(distances, axis=1),
            "atom": np.stack(atoms, axis=1),
        }

    def choose(scores: Scores, allowed: float) -> tuple[float, DecisionRule]:
        bound = partial(
            release_bound,
            trials=len(scores.without),
            delta=delta,
            confidence=allowed,
        )
        _, rule = _find_best_rule(scores, bound)
        return delta, rule

    bound, _, evidence = best_bound(
        look(without),
        look(with_it),
        learned,
        confidence,
        choose,
        shift=shift,
    )
    return bound, evidence


def find_repeated(rows: np.ndarray) -> np.ndarray:
    """Return the value that each coordinate takes most often, NaN if none comes twice: [d]."""
    value, count = mode(rows, axis=0)
    return np.where(count > 1, value, np.nan)


def count_repeats(rows: np.ndarray) -> np.ndarray:
    """Return how many numbers of each row, up to rounding, occur in it before: [n, d] -> [n]."""
    rounding = 1e-6 * np.abs(rows).max(axis=1, keepdims=True)
    gaps = np.diff(np.sort(rows, axis=1), axis=1)
    return (gaps <= rounding).sum(axis=1)


def best_bound(
    without: Views,
    with_it: Views,
    learned: int,
    confidence: float,
    choose: Callable[[Scores, float], tuple[float, DecisionRule]],
    claimed: Callable[[float], float] = lambda delta: 0.0,
    shift: np.ndarray | None = None,
) -> tuple[float, float, str]:
    """Return the bound on ε that goes furthest beyond the claim, its δ, and the counts behind it.

    Formal guarantees: the bound holds with the given confidence, for each of the three bounds
    fails with its share of the errors at most, whatever was learned.

    Args:
        learned: the first so many releases of each neighbour teach.
        choose: (their scores, confidence) -> δ and rule.
        claimed: δ -> the ε claimed for it.
        shift: as in `attack_release`, in the features of the projection.
    """
    best = (-math.inf, 0.0, "")
    furthest = -math.inf
    for view, share in SHARES.items():
        allowed = 1 - share * (1 - confidence)
        known_shift = shift if view == "projection" else None
        taught, tested = score(without[view], with_it[view], learned, known_shift)
        delta, rule = choose(taught, allowed)
        bound, evidence = bound_at(rule, tested, delta, allowed)
        if view != "projection":
            evidence = f"{evidence}, by {view}"
        if bound - claimed(delta) > furthest:
            furthest = bound - claimed(delta)
            best = (bound, delta, evidence)
    return best


def score(
    without: np.ndarray,
    with_it: np.ndarray,
    learned: int,
    shift: np.ndarray | None = None,
) -> tuple[Scores, Scores]:
    """Return scores of the first `learned` releases, which teach the direction, and the others.

    `without` and `with_it` are [releases, features], `shift` is as in `attack_release`.
    """
    direction = _least_noisy_direction(without[:learned], with_it[:learned], shift)
    absent = without @ direction
    present = with_it @ direction
    taught = Scores(absent[:learned], present[:learned])
    tested = Scores(absent[learned:], present[learned:])
    return taught, tested


def bound_at(
    rule: DecisionRule,
    scores: Scores,
    delta: float,
    confidence: float,
) -> tuple[float, str]:
    """Return a rule's bound on scores that did not teach it, and the counts behind it."""
    tested = len(scores.without)
    alarms = rule.count_guesses(scores.without)
    hits = rule.count_guesses(scores.with_it)
    if not rule.present:
        hits, alarms = alarms, hits
    bound = float(
        release_bound(
            np.array(hits),
            np.array(alarms),
            tested,
            delta,
            confidence,
        )
    )
    if hits == tested and alarms == 0:
        return bound, f"the attack wins {2 * tested:,} of {2 * tested:,}"
    return bound, f"{hits:,} hits and {alarms:,} false alarms in {tested:,} each"


def sharpest_test(scores: Scores, claimed: dict[float, float]) -> tuple[float, DecisionRule]:
    """Return δ and the rule by which these scores contradict a claimed curve most.

    That is where P[hit] − e^ε P[false alarm] − δ is most standard errors above 0. A bound on ε
    would be 0 for most δ while scores are few, and so could not choose.
    """
    trials = len(scores.without)

    def contradiction(
        hits: np.ndarray,
        alarms: np.ndarray,
        delta: float,
    ) -> np.ndarray:
        weight = np.exp(min(claimed[delta], 50.0))
        hit = (hits + 1) / (trials + 2)
        alarm = (alarms + 1) / (trials + 2)
        variance = hit * (1 - hit) + weight**2 * alarm * (1 - alarm)
        return (hit - weight * alarm - delta) / np.sqrt(variance / trials)

    rules = {
        delta: _find_best_rule(scores, partial(contradiction, delta=delta)) for delta in claimed
    }
    delta = max(rules, key=lambda delta: rules[delta][0])
    return delta, rules[delta][1]


def _find_best_rule(
    scores: Scores, merit: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[float, DecisionRule]:
    """Return the greatest merit of (hits, false alarms), and its rule, the middle of ties."""
    trials = len(scores.without)
    thresholds = _list_thresholds(scores)
    below_without = np.searchsorted(np.sort(scores.without), thresholds, side="right")
    below_with_it = np.searchsorted(np.sort(scores.with_it), thresholds, side="right")
    best_merit, best_rule = -np.inf, DecisionRule(0.0, True, True)
    for above in (True, False):
        guesses_without, guesses_with_it = below_without, below_with_it
        if above:
            guesses_without, guesses_with_it = trials - below_without, trials - below_with_it
        for present in (True, False):
            hits, alarms = guesses_with_it, guesses_without
            if not present:
                hits, alarms = alarms, hits
            merits = merit(hits, alarms)
            ties = np.flatnonzero(merits == merits.max())
            middle = int(ties[len(ties) // 2])
            if merits[middle] > best_merit:
                best_merit = float(merits[middle])
                best_rule = DecisionRule(float(thresholds[middle]), above, present)
    return best_merit, best_rule


def _list_thresholds(scores: Scores) -> np.ndarray:
    """Return quantiles of all scores, and the middle of a gap between the two neighbours'."""
    everything = np.concatenate([scores.without, scores.with_it])
    quantiles = np.quantile(everything, np.linspace(0.0005, 0.9995, 1000))
    gap = (scores.without.max() + scores.with_it.min()) / 2
    return np.sort(np.append(quantiles, gap))


def _least_noisy_direction(
    without: np.ndarray,
    with_it: np.ndarray,
    shift: np.ndarray | None,
) -> np.ndarray:
    """Σ⁻¹Δ, the best linear test (Fisher); a direction without noise decides alone."""
    mean_without = without.mean(axis=0)
    mean_with_it = with_it.mean(axis=0)
    if shift is None:
        shift = mean_with_it - mean_without
    noise = np.concatenate([without - mean_without, with_it - mean_with_it])
    variances, axes = np.linalg.eigh(noise.T @ noise / len(noise))
    scale = max(float(variances.max()), float(shift @ shift))
    floor = 1e-12 * (scale or 1.0)
    along_axes = (axes.T @ shift) / (np.maximum(variances, 0.0) + floor)
    direction = axes @ along_axes
    return direction / (np.linalg.norm(direction) or 1.0)
